"""The facts of a host: what is asked, and that a host that lacks everything still has them all."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.flashinfer_package import Versions
from gemmwire_service.doctor import host
from gemmwire_service.doctor.host import Fact, facts

NONE = Versions(None, None, None)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a GPU, a driver, a compiler or FlashInfer, whatever this one has."""

    def no_program(command: list[str], **options: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", no_program)
    monkeypatch.setattr(host, "_DRIVER_FILE", Path("nowhere"))
    monkeypatch.setattr(package, "nvcc", lambda: None)
    monkeypatch.setattr(package, "versions", lambda: NONE)
    monkeypatch.setattr(package, "installed", lambda name: None)


def found() -> dict[str, Fact]:
    return {fact.name: fact for fact in facts()}


def test_a_bare_host_has_every_fact() -> None:
    """Guards: a traceback where something is missing, and names that change under those who parse them."""
    assert list(found()) == [
        "gemmwire",
        "python",
        "platform",
        "gpu",
        "driver",
        "driver_cuda",
        "torch",
        "torch_cuda",
        "nvcc",
        "flashinfer-python",
        "cubins",
        "flashinfer_workspace",
        "cache_dir",
        "environment",
    ]
    assert found()["driver"] == Fact("driver", None)
    assert found()["flashinfer-python"].lacks == "not installed: pip install 'gemmwire[gpu]'"
    assert "CUDA_HOME" in (found()["nvcc"].lacks or "")


def test_a_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    monkeypatch.setattr(host, "capability", lambda device: (10, device.index))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert found()["gpu0"].value == "GPU number 0, compute capability 10.0"
    assert found()["gpu1"].value == "GPU number 1, compute capability 10.1"
    assert found()["driver_cuda"].value == "12.8"


def test_what_torch_warns_of_is_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: "no GPU" on a host whose driver is only too old."""

    def warn() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(host, "_driver_cuda", lambda: None)
    assert found()["gpu"].lacks == ("torch sees no CUDA device: The NVIDIA driver on your system is too old")


def says(text: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda command, **options: subprocess.CompletedProcess(command, 0, stdout=text, stderr="")


def test_the_driver_is_that_of_nvidia_smi_or_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    monkeypatch.setattr(host, "_DRIVER_FILE", file)
    assert found()["driver"].value == "570.86.15"
    monkeypatch.setattr(subprocess, "run", says("580.159.03\n580.159.03\n"))
    assert found()["driver"].value == "580.159.03"


def test_the_compiler_has_a_version_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "nvcc", lambda: "/cuda/bin/nvcc")
    assert "does not run" in (found()["nvcc"].lacks or "")
    monkeypatch.setattr(subprocess, "run", says("Cuda compilation tools, release 13.0, V13.0.48\n"))
    assert found()["nvcc"] == Fact("nvcc", "13.0 (/cuda/bin/nvcc)")


@pytest.mark.parametrize(
    ("versions", "name", "lacks"),
    [
        pytest.param(Versions("0.7.4", "0.7.4", "0.7.4+cu130"), "flashinfer-python", None, id="agree"),
        pytest.param(Versions("0.7.4", "0.7.4", "0.7.4+cu130"), "flashinfer-jit-cache", None, id="suffix"),
        pytest.param(Versions("0.7.4", "0.6.18", None), "flashinfer-cubin", "0.7.4 is needed", id="cubin"),
        pytest.param(Versions("0.7.4", None, "0.7.3+cu130"), "flashinfer-jit-cache", "0.7.4 is", id="jit"),
        pytest.param(Versions("0.7.5", None, None), "flashinfer-python", "0.7.4 is needed", id="python"),
        pytest.param(Versions("0.7.4", None, None), "flashinfer-cubin", "from the network", id="no-cubin"),
        pytest.param(Versions("0.7.4", None, None), "flashinfer-jit-cache", "compiled,", id="no-jit-cache"),
    ],
)
def test_packages_of_different_versions_are_told(
    monkeypatch: pytest.MonkeyPatch, versions: Versions, name: str, lacks: str | None
) -> None:
    """Guards: kernels that are downloaded or compiled in a request, because a package beside is ignored."""
    monkeypatch.setattr(package, "versions", lambda: versions)
    said = found()[name].lacks
    assert (said is None) if lacks is None else (said is not None and lacks in said)


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cache_folder", lambda setting: None)
    assert "--cache-dir" in (found()["cache_dir"].lacks or "")


def test_variables_that_matter_are_shown_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a token of somebody's environment in a bug report."""
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    monkeypatch.setenv("FLASHINFER_SECRET", "hunter2")
    value = found()["environment"].value or ""
    assert "FLASHINFER_NO_DOWNLOAD=1" in value
    assert "hunter2" not in value
