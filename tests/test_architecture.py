"""The shape of the code base, tested like any other behaviour."""

import ast
import functools
import graphlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = (
    ("errors", "files", "typing", "jaxprs"),
    ("settings",),
    ("schedule", "deepspeed", "sharding", "processes"),
    ("config", "ops", "storage", "optim"),
    ("data", "moe", "parallel", "stack"),
    ("models", "linen", "nnx", "train"),
    ("weights", "replicas"),
    ("checkpoint", "offload", "observe", "estimate"),
    ("generation",),
    ("run", "huggingface", "serve"),
    ("rl", "compress"),
    ("cli", "__main__"),
)
WITHIN = (
    {"errors", "files", "typing", "jaxprs"},
    {"models", "linen", "nnx"},
    {"cli", "__main__"},
)
"""Parts of one floor that may import each other: what they hold is one room."""
FLOOR = {part: height for height, parts in enumerate(FLOORS) for part in parts}
AXES = {"pipeline", "replica", "expert", "sequence", "tensor"}
"""Without `data`, which is a common word."""
MEMORIES = {"pinned_host", "nvme"}
MEMORY_MODULES = {
    "zjax.checkpoint.arrays",
    "zjax.cli.measuring",
    "zjax.estimate.candidates",
    "zjax.estimate.tables",
    "zjax.offload.blockwise",
    "zjax.ops.remat",
    "zjax.sharding.memory",
    "zjax.sharding.placement",
    "zjax.sharding.plan",
    "zjax.storage.io_threads",
}
"""Modules besides the settings that name memories; others ask an `ArrayPlan`. Flags of
`zjax.cli.measuring` are named so, too."""
SETTINGS = {"settings", "config", "schedule", "deepspeed"}
"""Parts that read the words of settings."""
PURE = {
    "advantages",
    "aggregation",
    "corrections",
    "distillation",
    "divergences",
    "kto",
    "logprobs",
    "losses",
    "masks",
    "objective",
    "preferences",
    "pretraining_loss",
    "ranges",
    "ratios",
    "reference_free",
    "returns",
    "reward_model",
    "value_loss",
}
"""Modules of `zjax.rl` that are functions of arrays, without a model or a run."""
FLAX = {"models", "linen", "nnx"}
MODULES = sorted((ROOT / "zjax").rglob("*.py"))
KERNELS = sorted((ROOT / "zjax_kernels").rglob("*.py"))
CONTESTS = sorted((ROOT / "examples" / "benchmarks" / "contests").rglob("*.py"))
PACKAGES = MODULES + KERNELS + CONTESTS
CONFIGURATION = (
    "setup.py",
    "setup.cfg",
    "tox.ini",
    "pytest.ini",
    "ruff.toml",
    ".ruff.toml",
    ".flake8",
    "mypy.ini",
    "pyrightconfig.json",
)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}
KERNEL_NAMES = {name_of(path) for path in KERNELS}


def part_of(name):
    return name.split(".")[1] if "." in name else ""


def place(path, node):
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def each_node(*kinds, modules=MODULES):
    """Every node of these kinds in zjax, with its file."""
    for path in modules:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds):
                yield path, node


def imported(node):
    """Full names that an import statement reaches for."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names]


def module_of(name):
    return name if name in NAMES | KERNEL_NAMES else name.rpartition(".")[0]


def test_every_part_has_a_floor():
    parts = {part_of(name) for name in NAMES} - {""}
    assert parts <= set(FLOOR)


def test_imports_point_down():
    wrong = []
    for path, node in each_node(ast.Import, ast.ImportFrom):
        own = part_of(name_of(path))
        others = {part_of(name) for name in imported(node) if name.startswith("zjax.")}
        if own:
            room = next((parts for parts in WITHIN if own in parts), {own})
            higher = {other for other in others - room if FLOOR[other] >= FLOOR[own]}
            wrong += [f"{place(path, node)} imports {other}" for other in higher]
    assert wrong == []


def test_the_picture_shows_the_floors():
    """Fails if docs/architecture.md has other floors, or no paragraph for a room."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.split("```text\n")[1].split("```")[0]
    assert [tuple(line.split()) for line in picture.splitlines()] == [*FLOORS[::-1]]
    described = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"\*\*.+?\*\*", page))))
    rooms = {x for x in FLOOR if (ROOT / "zjax" / x / "__init__.py").is_file()}
    assert rooms <= described


def test_no_module_reaches_for_everything():
    """Fails if one module knows so many others that a change anywhere concerns it."""
    known = {name: set() for name in NAMES}
    for path, node in each_node(ast.Import, ast.ImportFrom):
        known[name_of(path)] |= {module_of(x) for x in imported(node)} & NAMES
    wide = {name: len(others) for name, others in known.items() if len(others) > 30}
    assert wide == {}


def test_losses_of_rl_stay_pure():
    """Fails if a pure function of the algebra reaches for a model or a run."""
    wrong = []
    for path, node in each_node(ast.Import, ast.ImportFrom):
        if name_of(path).removeprefix("zjax.rl.") not in PURE:
            continue
        parts = {part_of(name) for name in imported(node) if name.startswith("zjax.")}
        high = {part for part in parts - {"rl"} if FLOOR[part] > FLOOR["ops"]}
        wrong += [f"{place(path, node)} imports {part}" for part in high]
    assert PURE <= {name.removeprefix("zjax.rl.") for name in NAMES}
    assert wrong == []


def test_imports_are_absolute():
    imports = each_node(ast.ImportFrom, modules=PACKAGES)
    assert [place(path, node) for path, node in imports if node.level] == []


def test_imports_have_no_cycle():
    known = NAMES | KERNEL_NAMES
    graph = {name: set() for name in known}
    statements = each_node(ast.Import, ast.ImportFrom, modules=MODULES + KERNELS)
    for path, node in statements:
        names = {module_of(name) for name in imported(node)}
        graph[name_of(path)] |= names & known
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == known


def test_kernels_import_jax_alone():
    """Fails if they could not be used without zjax; pictures may load Matplotlib."""
    # jaxlib comes with JAX: instructions that JAX does not name are written with it.
    allowed = {"jax", "jaxlib", "numpy", "zjax_kernels", *sys.stdlib_module_names}
    wrong = []
    for path, node in each_node(ast.Import, ast.ImportFrom, modules=KERNELS):
        is_top = node in tree_of(path).body
        libraries = {name.split(".")[0] for name in imported(node)} - allowed
        if libraries - (set() if is_top else {"matplotlib"}):
            wrong.append(place(path, node))
    assert wrong == []


def test_zjax_is_imported_at_the_top_only():
    wrong = []
    for path, function in each_node(ast.FunctionDef, ast.AsyncFunctionDef):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.split(".")[0] for name in imported(node)]
                wrong += [place(path, node)] * ("zjax" in names)
    assert wrong == []


def test_nothing_is_imported_for_types_only():
    names = each_node(ast.Name, ast.Attribute, ast.alias)
    wrong = [
        f"{path.relative_to(ROOT)}"
        for path, node in names
        if "TYPE_CHECKING" in (getattr(node, k, "") for k in ("id", "attr", "name"))
    ]
    assert wrong == []


def test_only_models_import_flax():
    wrong = []
    for path, node in each_node(ast.Import, ast.ImportFrom):
        libraries = {name.split(".")[0] for name in imported(node)}
        if "flax" in libraries and part_of(name_of(path)) not in FLAX:
            wrong.append(place(path, node))
    assert wrong == []


def test_every_module_says_its_idea():
    wrong = [name_of(p) for p in PACKAGES if not ast.get_docstring(tree_of(p))]
    assert wrong == []


def test_public_names_are_documented():
    wrong = []
    for path in PACKAGES:
        scopes = [tree_of(path)]
        for scope in scopes:
            for node in scope.body:
                is_class = isinstance(node, ast.ClassDef)
                if not is_class and not isinstance(node, ast.FunctionDef):
                    continue
                if node.name.startswith("_"):
                    continue
                if not ast.get_docstring(node):
                    wrong.append(f"{place(path, node)} {node.name}")
                scopes += [node] * is_class
    assert wrong == []


def test_packages_only_list_their_public_names():
    wrong = []
    for path in PACKAGES:
        if path.name != "__init__.py":
            continue
        body = tree_of(path).body
        known = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
        rest = [node for node in body[1:] if not isinstance(node, known)]
        wrong += [place(path, node) for node in rest]
        targets = [n.targets[0] for n in body if isinstance(n, ast.Assign)]
        wrong += [place(path, t) for t in targets if ast.unparse(t) != "__all__"]
        reached = {
            alias.asname or alias.name
            for node in body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        listed = [ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign)]
        if reached != {name for names in listed for name in names}:
            wrong.append(f"{path.relative_to(ROOT)}: __all__ is not what it imports")
    assert wrong == []


def test_mesh_axes_are_named_in_one_place():
    """A problem may name the section `pipeline` of the settings."""
    problems = [
        node
        for _, node in each_node(ast.Call)
        if ast.unparse(node.func) == "Problem" and node.args
    ]
    fields, wrong = [node.args[0] for node in problems], []
    for path, node in each_node(ast.Constant):
        name = name_of(path)
        at_home = name == "zjax.sharding.mesh" or part_of(name) in SETTINGS
        if node.value in AXES and not at_home and node not in fields:
            wrong.append(f"{place(path, node)} {node.value!r}")
    assert wrong == []


def test_functions_take_the_values_that_they_read():
    """Fails if more functions take a whole `Config` than those which start things."""
    found = []
    for path, function in each_node(ast.FunctionDef):
        hints = [
            ast.unparse(x.annotation)
            for x in ast.walk(function.args)
            if getattr(x, "annotation", None)
        ]
        takes_all = {"Config", "schema.Config"} & {h.split(" | ")[0] for h in hints}
        if takes_all and part_of(name_of(path)) not in SETTINGS | {
            "run",
            "rl",
            "compress",
            "estimate",
        }:
            found.append(f"{place(path, function)} {function.name}")
    assert len(found) <= 24, found


def test_memories_are_named_in_few_places():
    """Fails if a module compares the name of a memory in place of asking a plan."""
    found = set()
    for path, node in each_node(ast.Constant, ast.ImportFrom, ast.Attribute):
        if isinstance(node, ast.Constant):
            named = isinstance(node.value, str) and node.value in MEMORIES
        elif isinstance(node, ast.Attribute):
            named = ast.unparse(node) in {"plans.DEVICE", "plans.HOST", "plans.NVME"}
        else:
            names = {f"zjax.sharding.plan.{n}" for n in ("DEVICE", "HOST", "NVME")}
            named = bool(names & set(imported(node)))
        found |= {name_of(path)} if named else set()
    assert {x for x in found if part_of(x) not in SETTINGS} == MEMORY_MODULES


def test_pyproject_is_the_only_configuration():
    assert [name for name in CONFIGURATION if (ROOT / name).exists()] == []
