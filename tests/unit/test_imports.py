"""Imports in allred/ and includes in csrc/: downwards only and without cycles. Importing the package starts nothing."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import allred

ROOT = pathlib.Path(allred.__file__).parent
CSRC = ROOT.parent / "csrc"

# Top to bottom, the path of a gradient. A package may import what stands below it, and its own modules.
PACKAGES = (
    *(
        "__main__",
        "monitor",
        "spark",
        "compat",
        "run",
        "doctor",
        "cost_model",
        "bench",
        "testing",
        "keras",
        "tensorflow",
        "torch",
        "jax",
        "horovod",
        "__init__",
        "server",
        "startup",
        "changing_worlds",
        "world_creation",
    ),
    *(
        "membership",
        "session",
        "client",
        "launch",
        "modes",
        "ps",
        "comm",
        "fusion",
        "timeline",
        "watch",
        "data",
        "embeddings",
        "optim",
        "arena",
    ),
    *("cluster", "checkpoint", "gpu", "nest", "native", "arrays", "validators", "log", "world", "counters", "config"),
    *("page", "numbering", "errors", "command_line", "runtime", "launcher_variables", "wording"),
)

# Inside of comm, top to bottom: what users call; the communicator; the backends; what these are made of.
COMM = (
    {"root_functions", "gathered_functions", "shared_counter"},
    {"join", "functions", "process_set"},
    {"replicas"},
    {"create", "recording", "communicator", "host_reduce", "device_collectives", "device_reduce", "group"}
    | {"device_buckets", "device_operation", "point_to_point"},
    {"arguments"},
    {"node_memory"},
    {"backends"},
    {"select", "bootstrap"},
    {"messages"},
    {"work", "header", "ops"},
)

# The banner's version number is the one exception: it stands in __init__, where pyproject.toml reads it.
VERSION_NUMBER = ("allred.world_creation", "allred")

PRIVATE_BUT_DOCUMENTED = {"_replace", "_make", "_fields", "_asdict", "_exit", "_getframe", "_handleof"}
# torch has no public names for the end of a backward pass; its own DDP and FSDP use these.
PRIVATE_BUT_DOCUMENTED |= {"_C", "_execution_engine", "_current_graph_task_id", "_current_autograd_node"}

PRIVATE_BUT_DOCUMENTED |= {"_current_frames"}
PRIVATE_BUT_DOCUMENTED |= {"_ARRAY_API"}  # numpy's C API

# Names of torch without a public form, which backends written by others use too.
OF_TORCH = {"_C", "_distributed_c10d", "_current_autograd_node", "_disable_dynamo", "_execution_engine"}
OF_TORCH |= {
    "_set_sequence_number_for_group",
    "_register_backend",
    "_set_default_backend",
    "_timeout",
    "_world",
    "_dynamo",
    "_opt_called",
    "_wrapped_by_lr_sched",
}
OF_TORCH |= {"_create_internal", "_call_end_callbacks_on_future", "_len_torch_dispatch_stack", "_profiler_enabled"}
OF_TORCH |= {"_set_forward_pass_work_handle", "_create_work_from_future", "_version"}
OF_TORCH |= {"_remove_autograd_hooks", "_comm_hooks", "_register_comm_hook"}  # DDP gets a new reducer
OF_TORCH |= {"_static_graph_delay_allreduce_enqueued"}
OF_TORCH |= {"_BatchNorm"}  # the base class of its own SyncBatchNorm

# Names of pyspark without a public form, which its own estimators and libraries use too.
OF_SPARK = {"_jsc", "_dummy", "_set", "_setDefault", "_resetUid", "_copyValues", "_fit", "_transform"}


def name_of(path: pathlib.Path) -> str:
    """allred/comm/work.py -> allred.comm.work; allred/comm/__init__.py -> allred.comm"""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The parsed modules of allred by name."""
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def package_of(module: str) -> str:
    """allred.comm.backends.mpi -> comm; allred -> __init__"""
    return [*module.split("."), "__init__"][1]


def imports_of(tree: ast.Module, types: bool):
    """(module, name or "") of all imports from allred, also in functions. types: with those for type checkers only."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the module in full"
            yield from ((str(node.module), alias.name) for alias in node.names)
        todo += ast.iter_child_nodes(node)


@functools.cache
def graph(types: bool = False) -> dict[str, set[str]]:
    """The modules of allred that each module imports, with `types` also for type checkers only. `from allred.comm
    import work` imports allred.comm.work."""
    found: dict[str, set[str]] = {}
    for module, tree in modules().items():
        full = [
            f"{origin}.{name}" if f"{origin}.{name}" in modules() else origin
            for origin, name in imports_of(tree, types)
        ]
        found[module] = {each for each in full if each in modules()} - {module}
    return found


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph; [] if there is none.

    >>> cycle_in({"a": {"b"}, "b": {"a"}, "c": set()})
    ['a', 'b', 'a']
    """
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])[::-1]
    return []


def test_every_package_is_listed():
    found = {
        path.stem if path.is_file() else path.name for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert found - {"__pycache__"} == set(PACKAGES)


def test_imports_go_downwards():
    upwards = [
        (module, other)
        for module, others in graph().items()
        for other in others
        if package_of(other) != package_of(module)
        and PACKAGES.index(package_of(other)) <= PACKAGES.index(package_of(module))
    ]
    assert upwards == [VERSION_NUMBER]


def test_imports_inside_comm_go_downwards():
    def layer(module: str) -> int:
        return next(number for number, names in enumerate(COMM) if module.split(".")[2] in names)

    inside = [module for module in modules() if module.startswith("allred.comm.")]
    upwards = [
        (module, other)
        for module in inside
        for other in graph()[module]
        if other in inside and layer(other) < layer(module)
    ]
    assert upwards == []


def test_no_modules_import_each_other():
    edges = {
        module: {other for other in others if (module, other) != VERSION_NUMBER}
        for module, others in graph(types=True).items()
    }
    assert cycle_in(edges) == []


# Modules that have one user, so that there is one event loop and one authenticated channel. rank_output.py becomes the
# program of the rank, and imports nothing of allred, which would delay each start.
ONE_MECHANISM = {
    "selectors": {"allred.runtime.loop", "allred.run.rank_output"},
    "hmac": {"allred.runtime.channel"},
}


def imported(module: str) -> set[str]:
    """The modules of Python that a module of allred imports."""
    nodes = list(ast.walk(modules()[module]))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("name", ONE_MECHANISM)
def test_one_mechanism(name):
    assert {module for module in modules() if name in imported(module)} == ONE_MECHANISM[name]


def test_no_module_that_listens_reads_pickles():
    """Bytes of a stranger are read by the channel, which reads JSON before and after the proof."""
    calls = {
        module: {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
        for module, tree in modules().items()
    }
    listens = {module for module in modules() if calls[module] & {"listen", "create_server", "open_listener"}}
    listens -= {"allred.spark.rank_process"}  # for an address; its function arrives through a pipe of its parent
    assert len(listens) > 5
    assert [module for module in listens if imported(module) & {"pickle", "marshal", "cloudpickle"}] == []


def test_a_cycle_is_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_uses_a_private_name_of_another():
    found = []
    for module, tree in modules().items():
        found += [f"{module} imports {name}" for origin, name in imports_of(tree, types=False) if is_private(name)]
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
        own |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # slots
        found += [
            f"{module}:{node.lineno} uses {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
        ]
    assert found == []


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in {*PRIVATE_BUT_DOCUMENTED, *OF_TORCH, *OF_SPARK, "_kernels"}
    )


def test_no_c_files_include_each_other():
    """A header and the file of the same name count as one."""
    edges: dict[str, set[str]] = {}
    for path in sorted(CSRC.rglob("*.[ch]")):
        included = {pathlib.Path(name).stem for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)}
        edges.setdefault(path.stem, set()).update(included - {path.stem})
    assert len(edges) > 10
    assert cycle_in(edges) == []


def test_importing_starts_neither_mpi_nor_cuda():
    heavy = ("mpi4py.MPI", "cupy", "torch", "jax", "tensorflow", "keras", "ml_dtypes", "safetensors")
    code = f"import sys, allred; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_listed_and_documented():
    for name in allred.__all__:
        assert getattr(allred, name).__doc__, f"{name} has no docstring"
    public = {name for name in dir(allred) if not name.startswith("_")}
    packages = {path.stem for path in ROOT.iterdir()}
    assert public - packages == set(allred.__all__) - packages
    with pytest.raises(AttributeError, match="module 'allred' has no attribute 'allreduce__'"):
        allred.allreduce__  # noqa: B018


@pytest.mark.parametrize("name", allred._PACKAGES)
def test_packages_are_attributes_of_allred(name):
    code = f"import allred; print(allred.{name}.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == f"allred.{name}\n"


def test_type_checkers_find_the_names_where_they_are_imported_from():
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    [listed] = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    assert listed == allred.__all__
    found = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert found == {**allred._MODULES, **dict.fromkeys(allred._PACKAGES, "allred")}


THREADS = """
import random, threading, allred
names, failed, start = [name for name in dir(allred) if name[0] != "_"], [], threading.Barrier(32)
def use(seed):
    start.wait()
    for name in random.Random(seed).sample(names, len(names)):
        try: getattr(allred, name)
        except BaseException as error: failed.append((name, repr(error)))
threads = [threading.Thread(target=use, args=(seed,)) for seed in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed[0]
"""


def test_threads_may_use_names_first_at_the_same_time():
    for _ in range(4):
        subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60)


@pytest.mark.parametrize(("statement", "most"), [("import allred", 20), ("import allred; allred.init", 77)])
def test_the_modules_that_every_rank_imports_are_few(statement, most):
    """The number of modules of allred. A rank imports what it uses: most do not use sessions, data or mode ps."""
    code = f"import sys; {statement}; print(*(name for name in sys.modules if name.partition('.')[0] == 'allred'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) <= most, found


def test_no_submodule_hides_a_public_function():
    packages = {path.stem for path in ROOT.iterdir()}
    assert {name for name in allred.__all__ if name in packages} == {"data", "optim"}
