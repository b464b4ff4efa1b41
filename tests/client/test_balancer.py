"""Which of several hosts gets a request: every rule, by a clock that the test moves."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from gemmwire.balancer import Balancer, Lease


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def balancer(hosts: int, clock: Clock, jitter: float = 1.0) -> Balancer:
    return Balancer(hosts, clock, lambda low, high: low + (high - low) * (jitter - 1.0) / 0.5)


def picked(
    balancer: Balancer, nbytes: int = 1, tried: tuple[int, ...] = (), *, working: bool = False
) -> Lease:
    lease = balancer.pick(nbytes, tried, working=working)
    assert lease is not None
    return lease


def set_aside(balancer: Balancer, *hosts: int) -> None:
    for host in hosts:
        others = tuple(other for other in range(8) if other != host)
        balancer.failed(picked(balancer, tried=others))


def test_one_request_after_the_other_goes_round(clock: Clock) -> None:
    """Guards: a first host that does all the work where nothing is outstanding at any."""
    b = balancer(3, clock)
    hosts = []
    for _ in range(7):
        lease = picked(b)
        hosts.append(lease.host)
        b.answered(lease)
    assert hosts == [0, 1, 2, 0, 1, 2, 0]


def test_the_fewest_bytes_outstanding_win(clock: Clock) -> None:
    """Guards: requests that are counted, where one is a thousand times the other."""
    b = balancer(2, clock)
    large = picked(b, 1000)
    small = [picked(b, 300) for _ in range(3)]
    assert (large.host, [lease.host for lease in small]) == (0, [1, 1, 1])
    assert picked(b, 300).host == 1  # 900 are fewer than 1000
    assert picked(b, 1).host == 0  # 1200 are not
    b.answered(large)
    assert picked(b, 1).host == 0


@pytest.mark.parametrize("how", ["answered", "failed", "dropped"])
def test_however_a_request_ends_its_bytes_are_no_longer_outstanding(clock: Clock, how: str) -> None:
    """Guards: a host that looks busy for ever, after a call that was cancelled."""
    b = balancer(2, clock)
    lease = picked(b, 1000)
    getattr(b, how)(lease)
    clock.now += 60
    b.answered(picked(b, 1, (1,)))  # works again, where it had failed
    assert [picked(b, 10).host for _ in range(2)] == [1, 0]


def test_every_order_of_ends_leaves_nothing_outstanding(clock: Clock) -> None:
    """Guards: a sum that drifts with one order of answers, failures and cancellations."""
    for ends in itertools.product(("answered", "failed", "dropped"), repeat=4):
        b = balancer(2, clock)
        leases = [picked(b, size) for size in (7, 11, 13, 17)]
        for lease, end in zip(reversed(leases), ends, strict=True):
            getattr(b, end)(lease)
        assert [host.outstanding for host in b._hosts] == [0, 0]
        assert [host.trial for host in b._hosts] == [None, None]


def test_a_host_that_fails_gets_no_request_until_its_time_is_up(clock: Clock) -> None:
    b = balancer(2, clock)
    set_aside(b, 0)
    for _ in range(5):
        lease = picked(b)
        assert lease.host == 1
        b.answered(lease)
    clock.now += 0.2
    assert picked(b).host == 0


def test_a_host_on_trial_gets_one_request_until_that_is_answered(clock: Clock) -> None:
    """Guards: all threads at once on a host that has just come back, or has not."""
    b = balancer(2, clock)
    set_aside(b, 0)
    clock.now += 0.2
    assert picked(b).host == 1  # it was used longest ago
    trial = picked(b)
    others = [picked(b, 1) for _ in range(4)]
    assert (trial.host, {lease.host for lease in others}) == (0, {1})
    b.answered(trial)
    assert picked(b).host == 0


def test_a_trial_that_is_given_up_makes_room_for_another(clock: Clock) -> None:
    """Guards: a host that nobody tries any more, because the task that did was cancelled."""
    b = balancer(2, clock)
    set_aside(b, 0)
    clock.now += 0.2
    b.dropped(picked(b))
    assert picked(b, tried=(1,), working=True).host == 0


def test_each_failure_in_a_row_doubles_the_time_up_to_the_longest(clock: Clock) -> None:
    b = balancer(2, clock)
    times = []
    for _ in range(9):
        set_aside(b, 0)
        times.append(b._hosts[0].until - clock.now)
        clock.now = b._hosts[0].until
    assert times == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0])


def test_a_thousand_failures_are_no_overflow(clock: Clock) -> None:
    b = balancer(1, clock)
    for _ in range(2000):
        set_aside(b, 0)
    assert b._hosts[0].until - clock.now == 10.0


def test_an_answer_ends_the_row(clock: Clock) -> None:
    b = balancer(1, clock)
    for _ in range(5):
        set_aside(b, 0)
    b.answered(picked(b))
    set_aside(b, 0)
    assert b._hosts[0].until - clock.now == pytest.approx(0.2)


def test_what_fails_together_is_one_failure(clock: Clock) -> None:
    """Guards: eight threads on a host that is restarted, which is then aside for a minute."""
    b = balancer(1, clock)
    for lease in [picked(b) for _ in range(8)]:
        b.failed(lease)
    assert b._hosts[0].failures == 1


def test_an_answer_from_before_the_failure_says_nothing(clock: Clock) -> None:
    """Guards: a host that was killed, back in use by what it had sent before."""
    b = balancer(2, clock)
    early, late = picked(b, tried=(1,)), picked(b, tried=(1,))
    b.failed(late)
    b.answered(early)
    assert b.pick(1, (1,), working=True) is None


@pytest.mark.parametrize(("asked", "aside"), [(None, 0.2), (0.0, 0.2), (5.0, 5.0), (1e6, 60.0)])
def test_what_the_host_asks_for_is_respected_within_reason(
    clock: Clock, asked: float | None, aside: float
) -> None:
    b = balancer(1, clock)
    b.failed(picked(b), asked)
    assert b._hosts[0].until - clock.now == pytest.approx(aside)


def test_times_are_up_to_half_as_long_again_by_chance(clock: Clock) -> None:
    """Guards: clients that lost a host together and come back to it in the same moment."""
    b = Balancer(50, clock, random.Random(7).uniform)
    for lease in [picked(b) for _ in range(50)]:
        b.failed(lease)
    times = [host.until - clock.now for host in b._hosts]
    assert min(times) >= 0.2
    assert max(times) <= 0.3 + 1e-9
    assert len(set(times)) == 50


def test_where_all_are_aside_the_one_whose_time_is_up_first_is_tried(clock: Clock) -> None:
    """Guards: a call that fails without having been sent."""
    b = balancer(3, clock)
    set_aside(b, 2)
    clock.now += 0.01
    set_aside(b, 0)
    clock.now += 0.01
    set_aside(b, 1)
    assert [picked(b).host, picked(b, tried=(2,)).host, picked(b, tried=(2, 0)).host] == [2, 0, 1]
    assert b.pick(1, working=True) is None


def test_a_host_is_tried_though_another_tries_it_where_there_is_no_other(clock: Clock) -> None:
    b = balancer(1, clock)
    set_aside(b, 0)
    clock.now += 1
    assert [picked(b).host, picked(b).host] == [0, 0]


def test_none_is_left_where_all_were_tried(clock: Clock) -> None:
    assert balancer(2, clock).pick(1, (0, 1)) is None


def test_a_fork_has_nothing_outstanding_and_a_lock_of_its_own(clock: Clock) -> None:
    """Guards: a worker of a data loader that waits for a lock which a thread of its parent held."""
    b = balancer(2, clock)
    set_aside(b, 1)
    clock.now += 0.2
    leases = [picked(b, 100), picked(b, 100)]
    b._lock.acquire()
    b.reset_after_fork()
    assert [host.outstanding for host in b._hosts] == [0, 0]
    assert all(host.trial is None for host in b._hosts)
    for lease in leases:
        b.answered(lease)
    assert [host.outstanding for host in b._hosts] == [0, 0]


def test_threads_leave_nothing_outstanding() -> None:
    """Guards: a sum that two threads change at once."""
    b = Balancer(3)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(2000):
            lease = picked(b, chance.randrange(1, 1000))
            chance.choice((b.answered, b.failed, b.dropped))(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [host.outstanding for host in b._hosts] == [0, 0, 0]
