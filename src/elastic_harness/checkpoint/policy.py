"""The policy for a snapshot: how long checkpoints stay, where they are uploaded, and what a failure means. It travels
with the snapshot to the writer, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from elastic_harness.checkpoint.disk.retention import Retention
from elastic_harness.config import CheckpointConfig

OnFailure = Literal["warn", "retry", "fail"]


@dataclass(frozen=True)
class Upload:
    """Where checkpoints are uploaded, and how."""

    url: str
    interval: int = 1  # so many steps a checkpoint must be past the last one that was uploaded
    keep_last: int = 0  # so many stay there; 0: all
    mbps_max: float = 0.0  # megabits per second; 0: no limit
    full_every: int = 0  # one of so many is sent whole, the others as the difference to the one before; 0: all whole


@dataclass(frozen=True)
class Policy:
    """on_failure: "warn" reports the failure and goes on, "retry" first tries again for a while, "fail" ends the
    job."""

    retention: Retention = field(default_factory=Retention)
    upload: Upload | None = None
    on_failure: OnFailure = "warn"

    def pauses(self, pauses_s: Sequence[float]) -> list[float | None]:
        """Return the pause after each try that fails; None after the last."""
        return [*(pauses_s if self.on_failure == "retry" else ()), None]

    def failure(self, version: int, error: object, *, final: bool = True) -> dict[str, Any]:
        """Return the fields of the event about a failure. `final`: there is no further try. `fatal`: the job has to
        end."""
        fatal = final and self.on_failure == "fail"
        reason = " (checkpoint.async_save_policy is fail)" if fatal else ""
        return {"step": version, "error": f"{error}{reason}", "final": final, "fatal": fatal}

    def uploading_next(self) -> Policy:
        """Return the same policy, but with it the next checkpoint is uploaded at any interval."""
        return self if self.upload is None else replace(self, upload=replace(self.upload, interval=1))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "retention": list(self.retention)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Policy:
        upload = Upload(**data["upload"]) if data["upload"] else None
        return Policy(Retention(*data["retention"]), upload, data["on_failure"])


def policy_of(config: CheckpointConfig, url: str | None) -> Policy:
    """Return the policy that a configuration asks for. `url`: where this run's checkpoints are uploaded, None if they
    are not."""
    retention = Retention(
        config.keep_last, config.keep_every, config.keep_best, config.best_metric, config.best_mode
    )
    upload = None
    if url is not None:
        upload = Upload(
            url, config.upload_interval, config.s3_keep_last, config.upload_mbps_max, config.full_every
        )
    return Policy(retention, upload, config.async_save_policy)
