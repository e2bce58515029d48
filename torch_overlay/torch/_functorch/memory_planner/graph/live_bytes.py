"""The live bytes of many plans at once, in the forward or the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .liveness import Program
    from .storages import Operator


# The most plans in one tensor: the bits of a 64-bit integer, without the sign.
_TOGETHER = 63
# The share of the planned bytes that a tensor of plans may take, as both may be in the
# memory of the CPU.
_SHARE = 1 / 64


class LiveBytes:
    """The live bytes of many plans, in a phase that is run from its end to its start.

    Backwards, the first operator to touch a storage is the one that frees it.  ``kept``
    has a mask for each storage, of the plans that keep it for the backward: there, the
    forward does not free it, and the backward does not make it.

    Here, each operator runs by itself and stores its results; subclasses may differ.
    """

    def __init__(
        self,
        program: Program,
        kept: Sequence[int],
        is_forward: bool,
    ) -> None:
        self.nbytes, self.is_freed = program.nbytes, program.is_freed
        none = [0] * len(kept)
        self.touched, self.saved = ([*kept], none) if is_forward else (none, kept)
        # Changes in live bytes, the latest first, and the masks of the plans with each.
        self.masks, self.changes = [0], [0]
        # The step of each moment, and the index of the change that follows it.
        self.moments: list[tuple[int, int]] = []

    def add_change(self, plans: int, nbytes: int) -> None:
        """Add ``nbytes`` to what these plans have live from here on."""
        if plans and nbytes:
            self.masks.append(plans)
            self.changes.append(nbytes)

    def touch(self, storages: Iterable[int], plans: int) -> None:
        """Use storages in these plans; where nothing does so later, they are freed."""
        for s in storages:
            last = plans & ~self.touched[s]
            self.touched[s] |= last
            if self.is_freed[s]:
                self.add_change(last, -self.nbytes[s])

    def note_moment(self, step: int) -> None:
        """Count what is live here towards the peak of a step."""
        self.moments.append((step, len(self.masks) - 1))

    def run(self, each: Operator, plans: int, step: int) -> None:
        """Run an operator in these plans, as one moment."""
        if not plans:
            return
        self.touch(each.reads, plans)
        for s in each.writes:
            # A result that is saved already is dropped at once, as is an unused one.
            again = plans & self.saved[s]
            self.add_change(again, -self.nbytes[s])
            self.touch((s,), plans & ~again)
        scratch = each.scratch or 0
        self.add_change(plans, -scratch)
        self.note_moment(step)
        self.add_change(plans, each.nbytes + scratch)

    def peaks(self, count: int, base: int = 0) -> list[list[int]]:
        """For each of ``count`` plans, the most live bytes per step, plus ``base``."""
        found: list[list[int]] = []
        # During a trace, new tensors might become fake ones.
        with _disable_current_modes(), torch.device("cpu"):
            changes = torch.tensor(self.changes).unsqueeze(1)
            steps, before = torch.tensor(self.moments).unbind(1)
            most = int(_SHARE * sum(self.nbytes)) // changes.nbytes
            together = min(max(most, 1), _TOGETHER)
            for first in range(0, count, together):
                several = min(count - first, together)
                everyone = (1 << several) - 1
                masks = torch.tensor([mask >> first & everyone for mask in self.masks])
                of_plan = masks.unsqueeze(1) >> torch.arange(several) & 1
                later = (of_plan * changes).cumsum(0)
                live = later[-1] - later[before] + base
                peaks = live.new_zeros(int(steps.max()) + 1, several)
                of_step = steps.unsqueeze(1).expand_as(live)
                found += peaks.scatter_reduce_(0, of_step, live, "amax").T.tolist()
        return found
