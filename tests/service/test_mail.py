"""The mailbox that graphs look into: whose turn it is, and what a failure leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemmwire_service import mail as mail_module
from gemmwire_service.mail import SLOTS, Mailbox, mailbox
from gemmwire_service.staging import DEPTH
from scripted_cuda import ScriptedMail

CPU = torch.device("cpu")


def box() -> Mailbox:
    return Mailbox(ScriptedMail(), torch.zeros(4 * SLOTS, dtype=torch.int64), CPU)


def rows(value: float, m: int = 2) -> Tensor:
    return torch.full((m, 32), value, dtype=torch.bfloat16)


def test_entries_are_taken_in_the_order_of_the_posts() -> None:
    """Guards: a request that gets another's rows once the mailbox has been round."""
    mail, x = box(), torch.full((4, 32), 9.0, dtype=torch.bfloat16)
    waiting: list[tuple[Tensor, Tensor]] = []
    for number in range(5 * SLOTS):
        source, target = rows(float(number)), rows(-1.0)
        mail.post(source.data_ptr(), target.data_ptr(), 64, 64)
        waiting.append((source, target))
        if len(waiting) < DEPTH and number + 1 < 5 * SLOTS:
            continue
        while waiting:
            source, target = waiting.pop(0)
            mail.bring(x)
            assert torch.equal(x[:2], source)
            assert not x[2:].any()
            mail.send(x)
            assert torch.equal(target, source)


def test_there_are_more_entries_than_batches_under_way() -> None:
    """Guards: an entry that is overwritten before the device has read it."""
    assert SLOTS > DEPTH


def test_after_a_restart_the_next_post_is_the_next_to_be_taken() -> None:
    mail, x = box(), rows(0.0)
    for _ in range(3):
        mail.post(rows(1.0).data_ptr(), 0, 64, 0)  # and no replay
    mail.restart()
    source = rows(5.0)
    mail.post(source.data_ptr(), 0, 64, 0)
    mail.bring(x)
    assert torch.equal(x, source)


def test_without_triton_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    mail_module._kernels.cache_clear()
    assert mailbox(CPU) is None
    assert "Triton cannot be imported" in caplog.text
    mail_module._kernels.cache_clear()
