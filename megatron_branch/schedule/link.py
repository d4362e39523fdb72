"""Messages between neighbouring pipeline stages.

Both ends know every shape and every order from the plan, so nothing but the tensors travels. Forward and backward
messages
use a communicator each: they then cannot block one another, whatever the order in which the two ends reach them.

Always true:
- sending never waits: a stage that waited for its peer to take a message could keep that peer from taking it. What is
  under way is bounded by the schedule, which lets captures run ahead only while their state fits;
- `close` returns only after every message has left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


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
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def receive_forward(self, tokens: int) -> Tensor | None:
        """Hidden states of the stage before, `[tokens, 1, hidden]`; None on the first stage."""
        return None if self.previous is None else self._receive(tokens, self.previous, self.forward_group)

    def receive_backward(self, tokens: int) -> Tensor | None:
        """Gradient of this stage's output; None on the last stage."""
        return None if self.next is None else self._receive(tokens, self.next, self.backward_group)

    def send_forward(self, hidden: Tensor) -> None:
        """Send this stage's output on; nothing on the last stage."""
        if self.next is not None:
            self._send(hidden, self.next, self.forward_group)

    def send_backward(self, gradient: Tensor) -> None:
        """Send the gradient of this stage's input back; nothing on the first stage."""
        if self.previous is not None:
            self._send(gradient, self.previous, self.backward_group)

    def close(self) -> None:
        """Wait until every message has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def abandon(self) -> None:
        """Forget messages under way, after an error: their peers are gone or will be."""
        self._sent.clear()

    def _receive(self, tokens: int, peer: int, group: dist.ProcessGroup) -> Tensor:
        message = torch.empty((tokens, 1, self.hidden), dtype=self.dtype, device=self.device)
        dist.recv(message, src=peer, group=group)
        return message

    def _send(self, message: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        message = message.detach().contiguous()
        work = dist.isend(message, dst=peer, group=group)
        assert work is not None
        self._sent.append((work, message))
