"""etcd v3: the store of a cluster, a server for development, and a rendezvous for torchrun."""

from __future__ import annotations

from typing import Any


def torchrun_handler() -> Any:
    """The entry point of torchrun's `--rdzv-backend etcd-v3`: what makes a node's handler. Loaded when it is used:
    torchrun asks for it whatever rendezvous it is to use."""

    def create(params: Any) -> Any:
        from elastic_harness.etcd import torchrun

        return torchrun.create(params)

    return create
