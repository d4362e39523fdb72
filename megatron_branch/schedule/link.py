"""Messages between neighbouring pipeline stages.

Both ends know every shape and every order from the plan, so nothing but the tensors travels. Forward and backward
messages
use a communicator each: they then cannot block one another, whatever the order in which the two ends reach them.

Always true:
- a forward message never waits for its receiver: a stage that waited could keep that receiver from getting on. It is
  let go when a backward message shows that it was taken; the schedule bounds what is under way, because captures run
  ahead only while their state fits;
- at most `UNDER_WAY` backward messages are under way (and forward ones in a scoring pass, where nothing flows back):
  what a stage does before it takes one never depends on its sender's later messages, so waiting for it ends;
- `close` returns only after every message has left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

UNDER_WAY = 2


class _Sent(NamedTuple):
    """A message under way; its tensor must live until the work is done."""

    unit: int
    work: dist.Work
    message: Tensor


@dataclass
class Link:
    """The stage's two neighbours.

    Attributes:
        previous: global rank of the stage before, None on the first stage.
        next: global rank of the stage after, None on the last stage.
        forward_group: communicator of hidden states.
        backward_group: communicator of hidden gradients.
        dtype, device, hidden: of every message `[t, 1, hidden]`.
    """

    previous: int | None
    next: int | None
    forward_group: dist.ProcessGroup
    backward_group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device
    hidden: int
    _forward: deque[_Sent] = field(default_factory=deque)
    _backward: deque[_Sent] = field(default_factory=deque)

    def receive_forward(self, tokens: int) -> Tensor | None:
        """Hidden states of the stage before, `[tokens, 1, hidden]`; None on the first stage."""
        return None if self.previous is None else self._receive(tokens, self.previous, self.forward_group)

    def receive_backward(self, unit: int, tokens: int) -> Tensor | None:
        """Gradient of this stage's output for a unit; None on the last stage.

        The next stage has then taken the hidden states of this unit and, since both ends see units in one order, of all
        units before it.
        """
        if self.next is None:
            return None
        message = self._receive(tokens, self.next, self.backward_group)
        while self._forward and self._forward[0].unit <= unit:
            self._forward.popleft().work.wait()
        return message

    def send_forward(self, unit: int, hidden: Tensor, *, one_way: bool) -> None:
        """Send a unit's output on; nothing on the last stage. `one_way`: nothing will flow back (scoring)."""
        if self.next is not None:
            self._forward.append(self._send(unit, hidden, self.next, self.forward_group))
            while one_way and len(self._forward) > UNDER_WAY:
                self._forward.popleft().work.wait()

    def send_backward(self, unit: int, gradient: Tensor) -> None:
        """Send the gradient of this stage's input back; nothing on the first stage."""
        if self.previous is not None:
            self._backward.append(self._send(unit, gradient, self.previous, self.backward_group))
            while len(self._backward) > UNDER_WAY:
                self._backward.popleft().work.wait()

    def close(self) -> None:
        """Wait until every message has left."""
        for queue in (self._forward, self._backward):
            while queue:
                queue.popleft().work.wait()

    def abandon(self) -> None:
        """Forget messages under way, after an error: their peers are gone or will be."""
        self._forward.clear()
        self._backward.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that are not known to have been taken."""
        return sum(sent.message.nbytes for queue in (self._forward, self._backward) for sent in queue)

    def _receive(self, tokens: int, peer: int, group: dist.ProcessGroup) -> Tensor:
        message = torch.empty((tokens, 1, self.hidden), dtype=self.dtype, device=self.device)
        dist.recv(message, src=peer, group=group)
        return message

    def _send(self, unit: int, message: Tensor, peer: int, group: dist.ProcessGroup) -> _Sent:
        message = message.detach().contiguous()
        work = dist.isend(message, dst=peer, group=group)
        assert work is not None
        return _Sent(unit, work, message)
