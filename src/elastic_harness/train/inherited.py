"""The state with which a run begins from another run: the other's values under this program's settings."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch

from elastic_harness.checkpoint.disk import local, manifest
from elastic_harness.checkpoint.structure import Skeleton
from elastic_harness.errors import CheckpointCorrupt, ConfigError, InfrastructureError
from elastic_harness.runs.origin import Origin
from elastic_harness.train.imprint import imprint, state_hash
from elastic_harness.train.state import Registry

OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
Tensors = dict[str, torch.Tensor]


class Inherited:
    """Made by `start` before the first step, when optimizer and scheduler are as the program has set them. What a run
    knows of its own past steps begins anew."""

    def __init__(self, origin: Origin, registry: Registry, policies: Collection[str]) -> None:
        """`policies`: their names; their states begin anew."""
        self.origin = origin
        self._anew = {SCHEDULER, *policies}
        self._registry = registry
        skeleton, tensors = registry.capture()
        self._skeleton = {name: skeleton[name] for name in (OPTIMIZER, *self._anew) if name in skeleton}
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items() if _is_setting(name)}

    @property
    def version(self) -> int | None:
        """The version that can be restored from here; None if only the weights are taken, or it cannot be read."""
        if self.origin.weights_only or manifest.read(self.origin.checkpoint) is None:
            return None
        return self.origin.version

    def restore(self) -> tuple[str, str]:
        """Take the other run's whole state, but keep the optimizer's settings and the schedule as this program has
        them: the schedule is brought to the version by stepping it. States of policies that this program does not have
        are left out. Return the hash of the state that this gives, as
        `RunSaver.restore` does. Raises CheckpointCorrupt or ConfigError."""
        skeleton, tensors, meta = self._load()
        gone = set(meta.get("policies", ())) - self._registry.parts.keys()
        skeleton = {name: state for name, state in skeleton.items() if name not in gone}
        self._registry.restore(*self._with_own_settings(skeleton, tensors))
        self._step_schedule()
        held = state_hash(imprint(*self._registry.capture()))
        return held, held

    def _step_schedule(self) -> None:
        scheduler: Any = self._registry.parts.get(SCHEDULER)
        if scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer was not stepped, which is so
            for step in range(self.origin.version):
                try:
                    scheduler.step()
                except ValueError as error:
                    raise ConfigError(
                        f"the scheduler of this program ends after {step} steps ({error}), but {self.origin} has "
                        f"{self.origin.version}; make it longer, or take the weights alone (--weights-only)"
                    ) from error

    def prepare_step_0(self) -> None:
        """Prepare step 0 of a run that nobody has state of: take the weights, if they alone are taken. Raises
        InfrastructureError where the whole state is wanted: to begin with random weights would be silently wrong."""
        if not self.origin.weights_only:
            raise InfrastructureError(
                f"this run begins from {self.origin}, whose checkpoint {self.origin.checkpoint} is not there any more "
                f"({manifest.why_not(self.origin.checkpoint)}); restore it, or begin from another with --fresh"
            )
        try:
            _, tensors, _ = self._load()
        except CheckpointCorrupt as error:
            raise InfrastructureError(f"the weights of {self.origin} cannot be read: {error}") from error
        self._registry.restore_model(tensors)

    def _load(self) -> tuple[Skeleton, Tensors, dict[str, Any]]:
        found = manifest.read(self.origin.checkpoint)
        if found is None:
            raise CheckpointCorrupt(f"{self.origin.checkpoint}: {manifest.why_not(self.origin.checkpoint)}")
        if found.manifest["sha256"] != self.origin.manifest_sha256:
            raise ConfigError(
                f"{self.origin.checkpoint} is another checkpoint than when this run began: its run was trained anew "
                "since. Begin again with --fresh"
            )
        return local.load(found)

    def _with_own_settings(self, skeleton: Skeleton, tensors: Tensors) -> tuple[Skeleton, Tensors]:
        others = {name for name in skeleton if name not in self._anew and not name.startswith("$")}
        own = {name for name in self._registry.parts if name not in self._anew}
        if others != own:
            raise ConfigError(
                f"{self.origin} has the state of {', '.join(sorted(others))}, this program registers "
                f"{', '.join(sorted(own))}; register the same objects, or take the weights alone (--weights-only)"
            )
        groups = self._own_groups(skeleton[OPTIMIZER]["param_groups"])
        made = {**skeleton, OPTIMIZER: {**skeleton[OPTIMIZER], "param_groups": groups}}
        for name in self._anew:
            made.pop(name, None)
            if name in self._skeleton:
                made[name] = self._skeleton[name]
        values = {name: tensor for name, tensor in tensors.items() if not _is_setting(name)}
        return made, values | self._tensors

    def _own_groups(self, theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        own = self._skeleton[OPTIMIZER]["param_groups"]
        sizes, wanted = ([len(group["params"]) for group in groups] for groups in (theirs, own))
        if sizes != wanted:
            raise ConfigError(
                f"the optimizer of {self.origin} has parameter groups of {sizes} tensors, this program's of {wanted}; "
                "group them alike, or take the weights alone (--weights-only)"
            )
        return [{**mine, "params": other["params"]} for mine, other in zip(own, theirs, strict=True)]


def _is_setting(name: str) -> bool:
    """Whether a tensor of the state is what the program has set, not what training has made."""
    return name.startswith((f"{OPTIMIZER}.param_groups.", f"{SCHEDULER}."))
