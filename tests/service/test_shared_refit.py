"""Servers that share their refits through a folder: one version is one weight, on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import save

from exact_layer_versions import LAYER, K, N, X, checkpoint, expected, weight
from gemmwire import Answer, BadRequest, Client, Conflict, InvalidArgument, Overloaded, Retries, ServerFailed
from gemmwire_service import shared_refit
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.checkpoint.base import LayerWeights
from gemmwire_service.errors import CheckpointError, DeviceFailed, SettingsError
from gemmwire_service.refit_folder import RefitFolder
from gemmwire_service.settings import Settings, load
from gemmwire_service.shadow import Shadow
from http_calls import infer, message
from oracle import assert_same_bits
from serving import Served, serving, settings, until

Options = Callable[[], Settings]
PATIENT = Retries(20, delay=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "refits"
    path.mkdir()
    return path


@pytest.fixture
def options(tmp_path: Path, folder: Path) -> Options:
    model = checkpoint(tmp_path)
    return lambda: settings(model=(model,), refit_dir=str(folder))


@pytest.fixture
def pair(options: Options) -> Iterator[tuple[Served, Served]]:
    with serving(options()) as one, serving(options()) as two:
        yield one, two


def client(served: Served) -> Client:
    return Client(served.url, retries=PATIENT)


def version(served: Served) -> int:
    return served.engine.layers[LAYER].version


def assert_honest(answer: Answer) -> None:
    assert_same_bits(answer.y, expected(int(answer.version)))


def arrive(served: Served, number: int) -> None:
    until(lambda: version(served) == number, f"the server did not reach version {number}")


def reach(served: Served, number: int) -> None:
    arrive(served, number)
    with client(served) as asking:
        answer = asking.call(LAYER, X.bfloat16())
    assert answer.version == str(number)
    assert_honest(answer)


def test_what_one_is_given_all_serve_under_one_number(pair: tuple[Served, Served]) -> None:
    """Guards: replicas of which each has its own version 2."""
    for number, served in ((2, pair[0]), (3, pair[1]), (4, pair[1])):
        with client(served) as refitting:
            refitted = refitting.refit(LAYER, weight(number))
        assert (refitted.version, refitted.previous_version) == (str(number), str(number - 1))
        for each in pair:
            reach(each, number)


def test_one_that_starts_later_has_the_newest(options: Options, pair: tuple[Served, Served]) -> None:
    """Guards: a replica brought up by load that answers with the checkpoint's old weights."""
    with client(pair[0]) as refitting:
        refitting.refit(LAYER, weight(2))
        refitting.refit(LAYER, weight(3))
    with serving(options()) as late:
        assert version(late) == 3  # from its first moment on
        assert late.engine.layers[LAYER].fidelity_of(3) is not None
        reach(late, 3)


def test_a_refused_weight_changes_nothing_anywhere(pair: tuple[Served, Served], folder: Path) -> None:
    with client(pair[0]) as refitting, pytest.raises(BadRequest, match=rf"\[{N}, {K}\]"):
        refitting.refit(LAYER, weight(2)[:, :32].contiguous())
    assert list(folder.iterdir()) == []
    assert [version(each) for each in pair] == [1, 1]


def test_of_two_that_replace_one_version_one_wins(pair: tuple[Served, Served]) -> None:
    """Guards: two weights under one number, on two servers that both took the call for the only one."""

    def refit(served: Served) -> str:
        with Client(served.url, retries=0) as refitting:
            return refitting.refit(LAYER, weight(2), if_version=1).version

    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(refit, served) for served in pair]
    errors = [outcome.exception() for outcome in outcomes if outcome.exception() is not None]
    assert [type(error) for error in errors] == [Conflict]
    for each in pair:
        reach(each, 2)


def test_refits_that_meet_get_a_number_each(pair: tuple[Served, Served], folder: Path) -> None:
    """Guards: a weight that was acknowledged, and that no version has."""

    def refit(index: int) -> tuple[int, int]:
        with client(pair[index % 2]) as refitting:
            return int(refitting.refit(LAYER, weight(50 + index)).version), index

    with ThreadPoolExecutor(4) as pool:
        numbers = dict(pool.map(refit, range(8)))
    assert sorted(numbers) == list(range(2, 10))
    for each in pair:
        arrive(each, 9)
        with client(each) as asking:
            assert_same_bits(asking.call(LAYER, X.bfloat16()).y, expected(50 + numbers[9]))
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [f"{LAYER}@8.safetensors", f"{LAYER}@9.safetensors"]


def test_a_server_behind_may_be_told_of_a_newer_version(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: 409 for a caller who knows more than the server that it happened to reach."""
    monkeypatch.setattr(shared_refit, "PERIOD_S", 60)
    with client(pair[0]) as first, client(pair[1]) as second:
        first.refit(LAYER, weight(2))
        assert second.refit(LAYER, weight(3), if_version=2).version == "3"


def test_the_oldest_version_that_may_answer_is_the_caller_s(pair: tuple[Served, Served]) -> None:
    """Guards: a rollout computed with the weights before the step it belongs to."""
    for number in range(2, 6):
        with client(pair[0]) as refitting:
            refitting.refit(LAYER, weight(number))
        with client(pair[1]) as asking:
            answer = asking.call(LAYER, X.bfloat16(), min_version=number)
        assert int(answer.version) >= number
        assert_honest(answer)


def test_a_server_behind_says_so(pair: tuple[Served, Served]) -> None:
    for body, length in (
        message(X.bfloat16(), parameters={"minimum_version": 7}),
    ) * 2:  # read, and remembered
        reply = infer(pair[0], LAYER, body, length)
        assert (reply.status, reply.json["code"]) == (503, "version_behind"), reply.body
        assert (reply.json["expected"], reply.json["got"]) == (">= 7", 1)
        assert reply.headers["retry-after"] == "1"
    with Client(pair[0].url, retries=0) as asking, pytest.raises(Overloaded, match="version 1 here"):
        asking.infer(LAYER, X.bfloat16()[:0], min_version="2")


@pytest.mark.parametrize("minimum", ["2", -1, 1.0, True, 1 << 63])
def test_what_is_no_version_is_refused(pair: tuple[Served, Served], minimum: object) -> None:
    reply = infer(pair[0], LAYER, *message(X.bfloat16(), parameters={"minimum_version": minimum}))
    assert (reply.status, reply.json["code"]) == (400, "request_invalid"), reply.body


def test_the_client_refuses_what_is_no_version() -> None:
    with Client() as asking, pytest.raises(InvalidArgument, match="min_version is 'newest'"):
        asking.infer(LAYER, X.bfloat16(), min_version="newest")


def test_a_server_that_fails_after_all_others_know_takes_it_in_the_end(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a published version that the server which published it never serves."""
    exchange = Shadow.exchange
    failed: list[Shadow] = []

    def once(shadow: Shadow) -> None:
        if not failed:
            failed.append(shadow)
            raise RuntimeError("no")
        exchange(shadow)

    monkeypatch.setattr(Shadow, "exchange", once)
    with client(pair[0]) as refitting, pytest.raises(ServerFailed, match="version 1 is still served"):
        refitting.refit(LAYER, weight(2))
    for each in pair:
        reach(each, 2)


def test_a_server_that_cannot_keep_up_says_so_until_it_can(
    pair: tuple[Served, Served], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_refit, "_RETRY_S", 0.01)
    (folder / f"{LAYER}@2.safetensors").write_bytes(b"12345678")
    apps = [each.shared for each in pair if each.shared is not None]
    until(lambda: all(each.failure is not None for each in apps), "nobody complains")
    assert "@2.safetensors" in str(apps[0].failure)
    (folder / f"{LAYER}@3.safetensors").write_bytes(save({"weight": weight(3)}))
    for each in pair:
        reach(each, 3)
    until(lambda: all(each.failure is None for each in apps), "an old complaint stays")


def test_a_start_with_a_broken_newest_is_refused_naming_the_file(options: Options, folder: Path) -> None:
    """Guards: a server that comes up with old weights, because the new ones were cut."""
    (folder / f"{LAYER}@2.safetensors").write_bytes(save({"weight": weight(2)})[:-1])
    with (
        pytest.raises(CheckpointError, match=rf"{LAYER}@2\.safetensors: .*empty the folder"),
        serving(options()),
    ):
        pass


def test_what_else_is_in_the_folder_is_left_alone(options: Options, folder: Path) -> None:
    names = ("other@5.safetensors", f"{LAYER}@0.safetensors", f"{LAYER}@x.safetensors", ".1.partial", "note")
    for name in names:
        (folder / name).write_bytes(b"?")
    with serving(options()) as served, client(served) as refitting:
        assert version(served) == 1
        assert refitting.refit(LAYER, weight(2)).version == "2"
    assert {path.name for path in folder.iterdir()} == {*names, f"{LAYER}@2.safetensors"}


@pytest.mark.parametrize("name", ["a b", "sch\u00f6n", "%40", "x@2", "..hidden", "\u5c64" * 340, "a" * 1024])
def test_any_name_of_a_layer_is_a_name_of_a_file(folder: Path, name: str) -> None:
    kept = RefitFolder(folder)
    body = memoryview(save({"weight": weight(2)}))
    assert kept.publish(name, body, 1, None) == 2
    assert kept.newest([name, "other"]) == {name: 2}
    found = kept.read_newest(LayerSpec(name, N, K, bias=False))
    assert found is not None
    assert found[0] == 2


def test_a_folder_that_takes_nothing_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--refit-dir is"):
        RefitFolder.of(str(tmp_path / "none"))
    gone = RefitFolder(tmp_path / "gone")
    with pytest.raises(DeviceFailed, match="no server has taken it"):
        gone.publish(LAYER, memoryview(b"x"), 1, None)


def test_long_names_that_begin_alike_are_two(folder: Path) -> None:
    """Guards: one layer's weight served as another's, whose name has the same beginning."""
    kept = RefitFolder(folder)
    body = memoryview(save({"weight": weight(2)}))
    names = ["a" * 1000 + end for end in "bc"]
    assert [kept.publish(name, body, served, None) for name, served in zip(names, (1, 6), strict=True)] == [
        2,
        7,
    ]
    assert kept.newest(names) == dict(zip(names, (2, 7), strict=True))


def test_what_is_published_is_taken_though_the_old_cannot_be_removed(
    pair: tuple[Served, Served], folder: Path
) -> None:
    """Guards: an error that says that no server has a weight which all of them are about to serve."""
    (folder / f"{LAYER}@1.safetensors").mkdir()  # as where another user's files are in a folder with t
    for number in (2, 3):
        with client(pair[0]) as refitting:
            assert refitting.refit(LAYER, weight(number)).version == str(number)
    for each in pair:
        reach(each, 3)


def test_a_folder_that_went_is_said_to(pair: tuple[Served, Served], folder: Path) -> None:
    """Guards: an internal error, which names neither the folder nor what to do."""
    folder.rmdir()
    with client(pair[0]) as refitting, pytest.raises(ServerFailed, match=r"refits .*Is the folder there"):
        refitting.refit(LAYER, weight(2))
    folder.mkdir()
    with client(pair[0]) as refitting:
        assert refitting.refit(LAYER, weight(2)).version == "2"
    reach(pair[1], 2)


def test_a_server_without_memory_for_it_takes_it_later(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a server that looks into the folder no more, and serves its old weight for ever in silence."""
    monkeypatch.setattr(shared_refit, "_RETRY_S", 0.01)
    read, failures = RefitFolder.read, iter(range(5))

    def failing(kept: RefitFolder, spec: LayerSpec, number: int) -> LayerWeights:
        if next(failures, None) is not None:
            raise MemoryError
        return read(kept, spec, number)

    monkeypatch.setattr(RefitFolder, "read", failing)
    with client(pair[0]) as refitting:
        refitting.refit(LAYER, weight(2))
    reach(pair[1], 2)


@pytest.mark.parametrize("kind", ["huge", "pipe", "folder"])
def test_what_is_no_weight_is_refused_unread(folder: Path, kind: str) -> None:
    """Guards: memory for a file of terabytes, and a wait for who writes into a pipe."""
    path = folder / f"{LAYER}@2.safetensors"
    if kind == "huge":
        path.touch()
        os.truncate(path, 1 << 42)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"@2\.safetensors: (has 4398046511104 bytes|is not a regular)"):
        RefitFolder(folder).read(LayerSpec(LAYER, N, K, bias=False), 2)


def test_what_killed_servers_left_unfinished_goes(folder: Path) -> None:
    """Guards: a folder that fills up with weights that nobody will ever read."""
    old, new = (folder / f".{digit * 32}.partial" for digit in "ab")
    for path in (old, new):
        path.write_bytes(b"?")
    os.utime(old, (1, 1))
    RefitFolder(folder).publish(LAYER, memoryview(save({"weight": weight(2)})), 1, None)
    assert {path.name for path in folder.iterdir()} == {new.name, f"{LAYER}@2.safetensors"}


def test_models_that_one_server_loads_are_not_for_all(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--model-root is loaded by one"):
        load(["--refit-dir", str(tmp_path), "--model-root", str(tmp_path)], {})
