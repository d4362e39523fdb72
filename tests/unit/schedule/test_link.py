"""When messages under way are waited for, and when their tensors are let go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_branch.schedule.link import UNDER_WAY, Link


class Work:
    """A send that has not been taken until somebody waits for it."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """The works of all sends so far; receiving gives whatever the buffer holds."""
    works: list[Work] = []

    def isend(message: torch.Tensor, **to: Any) -> Work:
        works.append(Work())
        return works[-1]

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "recv", lambda message, **source: None)
    return works


@pytest.fixture
def link() -> Link:
    group: Any = None
    return Link(0, 2, group, group, torch.float32, torch.device("cpu"), hidden=4)


MESSAGE = torch.ones(3, 1, 4)


def waited(works: list[Work]) -> list[bool]:
    return [work.waited for work in works]


def test_forward_messages_are_held_until_their_gradient_comes_back(link: Link, sends: list[Work]) -> None:
    for unit in range(5):
        link.send_forward(unit, MESSAGE, one_way=False)
    assert waited(sends) == [False] * 5 and link.held_bytes == 5 * MESSAGE.nbytes
    link.receive_backward(2, 3)
    assert waited(sends) == [True, True, True, False, False] and link.held_bytes == 2 * MESSAGE.nbytes


def test_a_gradient_of_an_earlier_unit_lets_no_later_one_go(link: Link, sends: list[Work]) -> None:
    link.send_forward(7, MESSAGE, one_way=False)
    link.receive_backward(6, 3)
    assert waited(sends) == [False] and link.held_bytes == MESSAGE.nbytes


def test_backward_and_scoring_messages_under_way_are_bounded(link: Link, sends: list[Work]) -> None:
    for unit in range(UNDER_WAY + 1):
        link.send_backward(unit, MESSAGE)
    assert waited(sends) == [True] + [False] * UNDER_WAY
    sends.clear()
    for unit in range(UNDER_WAY + 1):
        link.send_forward(unit, MESSAGE, one_way=True)
    assert waited(sends) == [True] + [False] * UNDER_WAY


def test_close_returns_after_every_message_has_left(link: Link, sends: list[Work]) -> None:
    link.send_forward(0, MESSAGE, one_way=False)
    link.send_backward(0, MESSAGE)
    link.close()
    assert waited(sends) == [True, True] and link.held_bytes == 0


def test_abandoned_messages_are_not_waited_for(link: Link, sends: list[Work]) -> None:
    """After an error the peer may be gone, and waiting for it would hang."""
    link.send_forward(0, MESSAGE, one_way=False)
    link.send_backward(0, MESSAGE)
    link.abandon()
    assert waited(sends) == [False, False] and link.held_bytes == 0


def test_a_message_keeps_its_content_and_not_its_graph(
    link: Link, sends: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def isend(message: torch.Tensor, **to: Any) -> Work:
        sent.append(message)
        return Work()

    monkeypatch.setattr(dist, "isend", isend)
    hidden = torch.randn(4, 3, 1, requires_grad=True).permute(1, 2, 0)
    link.send_forward(0, hidden, one_way=False)
    assert sent[0].is_contiguous() and not sent[0].requires_grad and torch.equal(sent[0], hidden)
