"""The gradients of a unit while its slots are computed: autograd adds them up in p.grad, and nobody else may.

Between slots p.grad is empty and the sums are held here, so a `zero_grad` before a slot's backward does nothing. From
a slot's backward to its end p.grad holds the unit's sum: whatever changes it there depends on which slots this worker
adds up in place, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor, nn

from elastic_harness.checkpoint.tensors import content_of
from elastic_harness.errors import UserCodeError

PEEK_ELEMENTS = 4096
"""So much of one gradient is hashed in each slot, in turn: a change through `.data` leaves no other trace."""


class HeldGradients:
    """One sum per parameter, None where no slot had a gradient so far."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names = list(names)
        self._parameters = list(parameters)
        self._held: list[Tensor | None] = [None] * len(self._parameters)
        self._noted: list[tuple[Tensor | None, int]] | None = None
        self._peeked: tuple[int, int] = (0, 0)  # which gradient, the hash of its beginning
        self.lent = False  # whether p.grad holds the sums

    @property
    def on_gpu(self) -> bool:
        """Whether a parameter is on a GPU."""
        return any(parameter.is_cuda for parameter in self._parameters)

    def lend(self, where: str) -> None:
        """Put the sums where autograd adds to them. Raises UserCodeError if there are others already."""
        others = [parameter.grad is not None for parameter in self._parameters]
        if any(others):
            raise UserCodeError(
                f"Parameter {self._names[others.index(True)]} has a gradient before step.backward(loss) of {where}, "
                "which alone may compute gradients: call it in place of loss.backward(), once for each batch."
            )
        self.lent = True
        for parameter, gradient in zip(self._parameters, self._held, strict=True):
            if gradient is not None:
                parameter.grad = gradient

    def note_backward(self) -> None:
        """Remember what the backward has left."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._noted = [(g, -1 if g is None else g._version) for g in gradients]
        which = (self._peeked[0] + 1) % len(gradients)
        self._peeked = which, _peek(gradients[which])

    def take_back(self, where: str) -> None:
        """Empty p.grad. Raises UserCodeError if anything but the backward has changed it; `where`: in which slot."""
        if self._noted is None:
            return
        for (noted, version), name, parameter in zip(self._noted, self._names, self._parameters, strict=True):
            if parameter.grad is not noted or (noted is not None and noted._version != version):
                raise _changed(name, where)
        which, before = self._peeked
        if _peek(self._noted[which][0]) != before:
            raise _changed(self._names[which], where)
        self._held = [gradient for gradient, _ in self._noted]
        self._empty()

    def take_sums(self) -> list[Tensor | None]:
        """The finished sums, which are the caller's from now on."""
        taken, self._held = self._held, [None] * len(self._parameters)
        return taken

    def drop_sums(self) -> None:
        """Forget them."""
        self.take_sums()
        self._empty()

    def _empty(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._noted, self.lent = None, False


def _peek(gradient: Tensor | None) -> int:
    if gradient is None or gradient.layout != torch.strided or gradient.numel() == 0:
        return 0
    beginning = gradient.detach() if gradient.is_contiguous() else gradient.detach()[:1]
    return xxhash.xxh3_64(content_of(beginning.reshape(-1)[:PEEK_ELEMENTS])).intdigest()


def _changed(name: str, where: str) -> UserCodeError:
    return UserCodeError(
        f"The gradient of {name} was changed after step.backward(loss) of {where}. It is a part of the step's sum, and "
        "which part depends on the number of workers. Leave out zero_grad() and clip_grad_norm_(): gradients are "
        "emptied and, by training.clip_norm, clipped at the commit. Use parameter.register_hook() for what is to be "
        "done to each micro-batch's gradient, and optimizer.register_step_pre_hook() for what is to be done to the "
        "step's."
    )
