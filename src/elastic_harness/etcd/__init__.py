"""etcd v3: the store of a cluster, a server for development, and a rendezvous for torchrun."""

from __future__ import annotations

from typing import Any


def torchrun_handler() -> Any:
    """Return the function that makes a node's handler. It is the entry point of torchrun's `--rdzv-backend etcd-v3`.
    The module is loaded only when the function is called, because torchrun asks for it whatever rendezvous it is to
    use."""

    def create(params: Any) -> Any:
        from elastic_harness.etcd import torchrun

        return torchrun.create(params)

    return create
