"""Break the package on purpose and see the tests fail: `python tests/conformance/mutate.py [--only REGEX] [--list]`.

Each mutant of `mutants.py` is applied alone to a copy of the repository, and pytest runs there on the backends of its section
until a test fails. A mutant that no test notices survives, and fails the script: add the missing test, or drop the mutant
where it means the same as the original. Needs the extras `test` and `dev`, and git.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mutants import SECTIONS, Mutant
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
PASSED = "all tests passed"


class Job(NamedTuple):
    """A mutant, or None for the package as it is, on the backends of a section."""

    section: str
    mutant: Mutant | None

    @property
    def name(self) -> str:
        return f"{self.section}: {self.mutant.name if self.mutant else 'as it is'}"


def check(mutants: list[Mutant]) -> None:
    """Each old text must be there once: the list is to be kept with the code."""
    counts = [(mutant, (ROOT / mutant.file).read_text().count(mutant.old)) for mutant in mutants]
    wrong = [f"{m.file} has {count} times the old text of {m.name!r}: {m.old}" for m, count in counts if count != 1]
    if wrong:
        raise SystemExit("\n".join(["The old text of a mutant must occur once in its file.", *wrong]))


def copy_repository(to: Path) -> Path:
    """The files of the working tree that git does not ignore; Python must import the package from there."""
    names = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "--deduplicate"], cwd=ROOT, text=True
    )
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    code = "import funcnn; print(funcnn.__file__)"
    imported = subprocess.check_output([sys.executable, "-c", code], env=environment(to, ""), cwd=to, text=True)
    if not Path(imported.strip()).is_relative_to(to):
        raise SystemExit(f"the copy of the package must be the one that Python imports, got {imported.strip()}")
    return to


def environment(copy: Path, backends: str) -> dict[str, str]:
    return os.environ | {
        "FUNCNN_TEST_BACKENDS": backends,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def applied(mutant: Mutant | None, copy: Path) -> Iterator[None]:
    if mutant is None:
        yield
        return
    path = copy / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)


def first_failure(job: Job, copy: Path, timeout: float) -> str:
    """Run the likeliest test files, then the others: the first test that fails, or PASSED."""
    first = list(job.mutant.first) if job.mutant else []
    files = sorted(str(path.relative_to(copy)) for path in (copy / "tests").glob("test_*.py"))
    rest = [*(name for name in files if name not in first), "funcnn"]
    environ = environment(copy, SECTIONS[job.section].backends)
    with applied(job.mutant, copy):
        for batch in filter(None, (first, rest)):
            failure = run_tests(batch, copy, environ, timeout)
            if failure:
                return failure
    return PASSED


def run_tests(files: list[str], copy: Path, environ: dict[str, str], timeout: float) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=copy, env=environ, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"no end within {timeout:.0f} s"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if not failed and done.returncode in (1, -signal.SIGSEGV):  # the sanitizer of a kernel exits with 1 itself
        return "a test that ended the process"
    if done.returncode != 1 or not failed:  # a broken import is no mutant
        raise SystemExit(
            f"pytest ended with {done.returncode} before a test failed:\n{done.stdout[-3000:]}{done.stderr}"
        )
    return failed[1].removeprefix("tests/")


def run_all(jobs: list[Job], workers: int, timeout: float) -> dict[Job, str]:
    """Each job's first failing test; every worker has a copy of the repository."""
    copies: queue.Queue[Path] = queue.Queue()

    def run(job: Job) -> str:
        copy = copies.get()
        try:
            return first_failure(job, copy, timeout)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(workers) as pool:
        for i in range(workers):
            copies.put(copy_repository(Path(folder).resolve() / str(i)))
        waiting = {pool.submit(run, job): job for job in jobs}
        found = {}
        try:
            for future in tqdm(as_completed(waiting), total=len(waiting), unit="mutant"):
                job = waiting[future]
                found[job] = future.result()
                tqdm.write(f"{job.name}: {found[job]}", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="mutants whose 'section: name' has it")
    parser.add_argument("--list", action="store_true", help="name the mutants, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds of one test run, after which a mutant is dead"
    )
    parser.add_argument("--trust", action="store_true", help="skip the runs of the package as it is")
    arguments = parser.parse_args()

    jobs = [Job(name, mutant) for name, section in SECTIONS.items() for mutant in section.mutants]
    jobs = [job for job in jobs if re.search(arguments.only, job.name)]
    check([job.mutant for job in jobs])
    if arguments.list:
        print("\n".join(f"{job.name} ({job.mutant.file})" for job in jobs), f"\n{len(jobs)} mutants")
        return
    if not arguments.trust:
        unbroken = {SECTIONS[job.section].backends: Job(job.section, None) for job in jobs}
        for job, outcome in run_all(list(unbroken.values()), arguments.jobs, arguments.timeout).items():
            if outcome != PASSED:
                raise SystemExit(
                    f"{job.name}: every test must pass before anything is broken, got a failure: {outcome}"
                )
    found = run_all(jobs, arguments.jobs, arguments.timeout)
    survivors = [job for job in jobs if found[job] == PASSED]
    width = max((len(job.name) for job in jobs), default=0)
    for job in jobs:
        if job not in survivors:
            print(f"{job.name:{width}}  {found[job]}")
    for job in survivors:
        print(f"{job.name:{width}}  SURVIVED")
    print(f"\n{len(jobs)} mutants, {len(survivors)} survived")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
