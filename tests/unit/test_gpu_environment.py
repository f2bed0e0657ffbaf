"""tests/gpu/environment.py, which `make test-gpu` runs first: a part of its list, with packages that fail."""

import importlib.util
import pathlib

SCRIPT = pathlib.Path(__file__).parents[1] / "gpu/environment.py"


def test_all_that_is_missing_is_listed_with_a_remedy(tmp_path, monkeypatch, capfd):
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    tried = ("cupy", "safetensors", "mpirun", "numpy")
    monkeypatch.setattr(environment, "NEEDED", [line for line in environment.NEEDED if line[0] in tried])
    for name in ("cupy", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert environment.main() == 1
    assert capfd.readouterr().out.splitlines()[1:] == [
        "  cupy: pip install cupy-cuda13x, or the one for your CUDA",
        "      ImportError: not here",
        "  mpirun: pip install mpich, or make test-gpu MPI_WHEEL=mpich.whl",
        "      AssertionError: it is not in PATH",
        "  safetensors: pip install safetensors",
        "      ImportError: not here",
    ]
