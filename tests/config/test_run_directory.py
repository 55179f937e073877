"""A run directory is locked while in use, never overwritten unasked, and its failures name the fix."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import RunDirectoryError
from asyncrl.observability.metrics import MetricsLog, StepTimer
from asyncrl.run_directory import Gang, RunDirectory, running_beside

HOLD = """
import sys
from asyncrl.config import Config
from asyncrl.run_directory import RunDirectory
with RunDirectory.open(Config.model_validate({"run": {"dir": sys.argv[1]}})):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    def config(if_exists: str = "error", dir: Path | None = None, **sections: object) -> Config:
        run = {"dir": dir or tmp_path / "run", "if_exists": if_exists}
        return Config.model_validate({"run": run, **sections})

    return config


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_new_directory_gets_the_resolved_configuration_without_secrets(config):
    with RunDirectory.open(config(data={"args": {"hf_token": "s3cret"}}), {"run.dir": "--run.dir"}) as run:
        text = run.config.read_text()
        assert tomllib.loads(text)["data"]["args"] == {"hf_token": "<redacted>"}
        assert "# --run.dir" in text
        assert run.logs.is_dir()
        assert not run.export.exists()
        assert {run.metrics.parent, run.events.parent, run.summary.parent} == {run.path}
        assert run.attempt == 0


def test_an_empty_directory_is_taken(config, tmp_path):
    (tmp_path / "run").mkdir()
    RunDirectory.open(config()).close()


def test_a_second_process_is_told_who_holds_the_directory(config, tmp_path):
    with holder(tmp_path / "run") as process:
        for policy in ("error", "overwrite"):
            with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on "):
                RunDirectory.open(config(policy))
        with RunDirectory.open(config("new")) as run:
            assert run.path == tmp_path / "run-2"
    assert (tmp_path / "run" / "config.toml").exists()


def test_a_killed_process_leaves_no_lock(config, tmp_path):
    with holder(tmp_path / "run") as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        RunDirectory.open(config("overwrite")).close()


def test_a_process_that_the_run_started_does_not_keep_the_lock(config):
    run = RunDirectory.open(config())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        run.close()
        run.close()
        RunDirectory.open(config("overwrite")).close()
    finally:
        child.kill()
        child.wait()


def test_a_finished_run_is_kept_unless_asked(config):
    with RunDirectory.open(config()) as run:
        run.summary.write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*--run.if-exists"):
        RunDirectory.open(config())
    assert run.summary.exists()


def test_results_of_earlier_attempts_are_set_aside_under_their_numbers(config):
    for attempt in range(3):
        with RunDirectory.open(config("resume")) as run:
            kept = [path.name for path in run.set_results_aside()]
            assert kept == ([f"export.attempt-{attempt - 1}", f"summary.attempt-{attempt - 1}.json"] if attempt else [])
            assert not run.export.exists()
            run.export.mkdir()
            (run.export / "config.json").write_text(str(attempt))
            run.summary.write_text("{}")
    for attempt in range(2):
        assert (run.path / f"export.attempt-{attempt}" / "config.json").read_text() == str(attempt)


def test_a_run_that_came_to_nothing_may_have_samples_and_trackers(config):
    with RunDirectory.open(config()) as run:
        (run.path / "trackers").mkdir()
        (run.path / "samples.jsonl").touch()
    with RunDirectory.open(config()) as again:
        assert again.path == run.path and not (run.path / "trackers").exists()


def test_new_takes_the_next_free_name(config, tmp_path):
    paths = []
    for _ in range(3):
        with RunDirectory.open(config("new")) as run:
            paths.append(run.path)
            run.metrics.write_text("{}\n")
    assert paths == [tmp_path / "run", tmp_path / "run-2", tmp_path / "run-3"]


@pytest.mark.parametrize("policy", ["error", "new", "overwrite"])
def test_a_run_that_came_to_nothing_is_replaced(config, tmp_path, policy):
    with RunDirectory.open(config()) as run:
        run.metrics.touch()
        run.events.write_text("{}\n")
        (run.logs / "engine-0.log").touch()
    with RunDirectory.open(config(policy)) as again:
        assert again.path == run.path
        assert not again.events.exists() and not list(again.logs.iterdir())


@pytest.mark.parametrize("kept", ["summary.json", "export", "failures", "notes.txt", "metrics.jsonl"])
def test_a_run_with_anything_to_keep_is_kept(config, kept):
    with RunDirectory.open(config()) as run:
        (run.path / kept).write_text("something")
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        RunDirectory.open(config())
    with RunDirectory.open(config("new")) as other:
        assert other.path != run.path
    assert (run.path / kept).read_text() == "something"


@pytest.mark.parametrize("policy", ["error", "overwrite"])
def test_a_run_in_its_first_step_is_left_alone(config, tmp_path, policy):
    with holder(tmp_path / "run") as process:
        for refuse in (RunDirectory.open, RunDirectory.check):
            with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
                refuse(config(policy))
        RunDirectory.check(config("new"))


def test_a_running_job_of_a_similar_name_is_found(config, tmp_path):
    for name in ("run", "run-3", "runner"):
        RunDirectory.open(config(dir=tmp_path / name)).close()
    with holder(tmp_path / "run-2"), holder(tmp_path / "run-x"):
        for path in ("run", "run-3", "run-2"):
            assert running_beside(tmp_path / path) == (tmp_path / "run-2",)
        asked = subprocess.run(
            [sys.executable, "-c", "from asyncrl.cli import main; main()", "stop", str(tmp_path / "run")],
            capture_output=True,
            text=True,
        )
        assert asked.returncode == 2
        assert asked.stderr == f"error: {tmp_path}/run: no job is running there; one is in {tmp_path}/run-2\n"
    assert running_beside(tmp_path / "run") == ()


def test_what_a_start_would_refuse_is_told_without_touching_anything(config, tmp_path):
    RunDirectory.check(config())
    RunDirectory.check(config(dir=tmp_path / "deep" / "er"))
    assert not list(tmp_path.iterdir())
    with RunDirectory.open(config()) as run:
        run.summary.write_text("{}")
    before = {entry.name for entry in run.path.iterdir()}
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        RunDirectory.check(config())
    for policy in ("new", "overwrite"):
        RunDirectory.check(config(policy))
    assert {entry.name for entry in run.path.iterdir()} == before
    RunDirectory.check(config(), gang=Gang("7@7", 1))  # its own first attempt made it
    with pytest.raises(RunDirectoryError, match="holds files that are not of a run"):
        RunDirectory.check(config(dir=Path("/")))


def test_overwrite_erases_a_run_and_nothing_outside_it(config, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    with RunDirectory.open(config()) as run:
        run.summary.write_text("{}")
        run.export.mkdir()
        (run.export / "model.safetensors").touch()
        (run.path / "link").symlink_to(outside)
    with RunDirectory.open(config("overwrite")) as run:
        assert run.let_former_go()
        assert run.erase_former() == ""
        assert {entry.name for entry in run.path.iterdir()} == {".lock", ".asyncrl-run.json", "config.toml", "logs"}
        assert run.put_former_back() is None
    assert (outside / "kept").exists()


def files_of(path: Path) -> dict[str, str]:
    """Text by relative path, without the lock."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_text() for file in files}


@pytest.fixture
def former(config) -> dict[str, str]:
    """Files of a run that lies in the directory."""
    with RunDirectory.open(config()) as run:
        run.metrics.write_text("{}\n")
        run.export.mkdir()
        (run.export / "model.safetensors").write_text("weights")
    return files_of(run.path)


def test_a_run_that_is_to_be_overwritten_is_back_where_the_new_one_ends_before_its_first_step(config, former):
    with RunDirectory.open(config("overwrite")) as run:
        (run.logs / "engine-0.log").write_text("out of memory")
        failed = run.put_former_back()
    assert failed == run.path / "failed-start"
    assert (failed / "logs" / "engine-0.log").read_text() == "out of memory"
    assert former.items() <= files_of(run.path).items()
    with RunDirectory.open(config("overwrite"), gang=Gang("8@8", 0)) as again:
        assert (again.path, again.attempt) == (run.path, 0)
        again.put_former_back()
    assert former.items() <= files_of(run.path).items()
    assert set(files_of(run.path / "failed-start")) == {".asyncrl-run.json", "config.toml"}, "of the last one alone"


@pytest.mark.parametrize("policy", ["error", "new", "overwrite", "resume"])
def test_a_run_that_is_to_be_overwritten_outlives_a_new_one_that_was_killed(config, former, policy):
    with RunDirectory.open(config("overwrite")) as killed:
        pass
    if policy == "error":
        with pytest.raises(RunDirectoryError, match="already holds a run"):
            RunDirectory.open(config(policy))
        return
    with RunDirectory.open(config(policy)) as run:
        assert (run.path == killed.path) == (policy != "new")
        if policy == "resume":
            assert (run.attempt, run.metrics.read_text()) == (1, "{}\n")
            return
        if policy == "overwrite":
            run.put_former_back()
    with RunDirectory.open(config("resume")) as run:
        assert (run.export / "model.safetensors").read_text() == "weights"


def evaluated(run: RunDirectory) -> None:
    with closing(MetricsLog(run.metrics)) as metrics:
        metrics.write(500, {"eval/accuracy": 0.5})


def a_step(run: RunDirectory) -> None:
    evaluated(run)
    with closing(MetricsLog(run.metrics)) as metrics:
        metrics.write(1, StepTimer().finish_step().metrics())


def a_folder(name: str) -> Callable[[RunDirectory], None]:
    return lambda run: (run.path / name).mkdir(parents=True)


TRAINED = [a_step, a_folder("checkpoints/step-000001"), a_folder("export")]
NOT_YET = [evaluated, a_folder("checkpoints/.step-000001.1"), a_folder("failures"), a_folder("my_notes")]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("left", "stays"), [(left, True) for left in TRAINED] + [(left, False) for left in NOT_YET])
def test_a_run_that_has_trained_a_step_is_resumed_and_not_the_one_that_it_overwrites(
    config, former, left, stays, killed
):
    """However it ended: it may have had no time to say that it has results."""
    with RunDirectory.open(config("overwrite"), gang=Gang("8@8", 0)) as run:
        left(run)
        (run.logs / "engine-0.log").write_text("of the new run")
        if not killed:
            assert (run.put_former_back() is None) == stays
    with RunDirectory.open(config("resume"), gang=Gang("9@9", 0)) as resumed:
        assert (resumed.path, resumed.attempt) == (run.path, 1)
        assert (resumed.logs / "engine-0.log").exists() == stays
        assert (resumed.export / "model.safetensors").exists() != stays
        assert (resumed.path / "failed-start").exists() != stays
        resumed.let_former_go()
        assert resumed.erase_former() == "" and not list(run.path.glob(".erased*"))
        assert not (run.path / ".former").exists()


def test_a_file_that_cannot_be_erased_is_told_and_in_the_way_of_no_later_overwrite(config, former, monkeypatch):
    unlink = os.unlink

    def resist(path, *args, **how):
        if os.fspath(path).endswith("model.safetensors"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fspath(path))
        unlink(path, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", resist)
        for _ in range(2):
            with RunDirectory.open(config("overwrite")) as run:
                assert run.let_former_go()
                assert "not all erased, the next job tries again: [Errno 1]" in run.erase_former()
                run.metrics.write_text("{}\n")
                run.export.mkdir()
                (run.export / "model.safetensors").touch()
        assert len(list(run.path.glob(".erased*"))) == 2
        run.metrics.unlink()
        (run.export / "model.safetensors").rename(run.path.parent / "elsewhere")
        run.export.rmdir()
        with RunDirectory.open(config("error")) as begun:  # what came to nothing is replaced beside what resists
            assert begun.path == run.path
    with RunDirectory.open(config("error")) as run:
        assert run.let_former_go() and run.erase_former() == "" and not list(run.path.glob(".erased*"))


def test_wherever_a_move_of_the_former_run_is_cut_short_nothing_of_it_is_lost(config, former, monkeypatch):
    rename, left = Path.rename, 0

    def cut_short(self, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", cut_short)
    for moves in range(100):
        left, cut = moves, False
        try:
            with RunDirectory.open(config("overwrite")) as run:
                run.put_former_back()
        except KeyboardInterrupt:
            cut = True
        left = 100
        with RunDirectory.open(config("overwrite")) as run:
            run.put_former_back()
        assert former.items() <= files_of(run.path).items()
        if not cut:
            break
    assert moves > 12


@pytest.mark.parametrize("policy", ["error", "overwrite"])
def test_a_directory_that_is_no_run_is_never_touched(config, tmp_path, policy):
    other = tmp_path / "run"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="holds files that are not of a run"):
        RunDirectory.open(config(policy))
    assert [entry.name for entry in other.iterdir()] == ["thesis.txt"]


def test_new_passes_over_a_directory_that_is_no_run(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    with RunDirectory.open(config("new")) as run:
        assert run.path == tmp_path / "run-2"


@pytest.mark.parametrize("name", [".", "", "sub/..", "./"])
def test_new_beside_the_current_directory_has_a_name(config, tmp_path, monkeypatch, name):
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    with RunDirectory.open(config("new", dir=Path(name))) as run:
        assert run.path == tmp_path / "here-2"


def test_the_root_directory_is_refused(config):
    with pytest.raises(RunDirectoryError, match="no other name for /"):
        RunDirectory.open(config("new", dir=Path("/")))


def test_runs_that_start_in_the_same_moment_get_names_of_their_own(tmp_path):
    code = HOLD.replace('{"dir": sys.argv[1]}', '{"dir": sys.argv[1], "if_exists": "new"}')
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3", "run-4"]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("policy", ["error", "new", "overwrite"])
def test_a_path_that_cannot_be_a_directory_is_one_clear_error(config, tmp_path, policy):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/no/such"), tmp_path / ("x" * 300)):
        for refuse in (RunDirectory.check, RunDirectory.open):
            with pytest.raises(RunDirectoryError, match=r"run\.dir: cannot use .*; choose another with --run.dir"):
                refuse(config(policy, dir=path))


def test_a_full_disk_is_one_clear_error_and_leaves_no_lock(config, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot use .*File too large"):
            RunDirectory.open(config())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "run").glob("*.partial"))
    RunDirectory.open(config("overwrite")).close()


@pytest.mark.parametrize("policy", ["error", "new", "overwrite", "resume"])
def test_a_restarted_gang_goes_on_in_its_own_directory(config, tmp_path, policy):
    if policy == "new":
        with RunDirectory.open(config(), gang=Gang("1@1", 0)) as other:
            other.summary.touch()
    with RunDirectory.open(config(policy), gang=Gang("7@7", 0)) as first:
        first.metrics.write_text("{}\n")
    with RunDirectory.open(config(policy), gang=Gang("7@7", 1)) as second:
        assert (second.path, second.attempt) == (first.path, 1)
        assert second.metrics.read_text() == "{}\n"


def test_a_gang_that_died_before_its_directory_takes_one_on_restart(config, tmp_path):
    with RunDirectory.open(config(), gang=Gang("7@7", 2)) as run:
        assert (run.path, run.attempt) == (tmp_path / "run", 2)


def test_a_gang_that_died_before_it_took_an_old_directory_began_when_it_took_it(config):
    """What attempts of other jobs wrote there is not its own, however often it was restarted."""
    for number in range(5):
        with RunDirectory.open(config("resume"), gang=Gang(f"{number}@1", 0)) as run:
            run.metrics.write_text("{}\n")
    for restarts, attempt in [(1, 5), (2, 6)]:
        with RunDirectory.open(config("resume"), gang=Gang("7@7", restarts)) as run:
            assert (run.attempt, run.first_attempt) == (attempt, 5)


def test_processes_outside_torchrun_are_their_own_gang():
    own = Gang.detect({})
    assert own.agent.startswith(f"{os.getpid()}@")
    under = Gang.detect({"TORCHELASTIC_RESTART_COUNT": "2"})
    assert under.agent.startswith(f"{os.getppid()}@")
    assert under.restarts == 2


def test_a_resumed_run_keeps_what_it_has_and_counts_attempts_on(config, tmp_path):
    with RunDirectory.open(config("resume"), gang=Gang("1@1", 0)) as first:
        assert first.attempt == 0
        first.metrics.write_text("{}\n")
    for attempt, gang in [(1, Gang("2@2", 0)), (2, Gang("2@2", 1)), (3, Gang("3@3", 0))]:
        RunDirectory.check(config("resume"), gang=gang)
        with RunDirectory.open(config("resume"), gang=gang) as again:
            assert (again.path, again.attempt) == (first.path, attempt)
            assert again.metrics.read_text() == "{}\n"
            assert again.first_attempt == {1: 1, 2: 1, 3: 3}[attempt]
            assert again.weight_version(7) == f"{attempt}.7"
            with pytest.raises(RunDirectoryError, match="in use"):
                RunDirectory.open(config("resume"), gang=Gang("9@9", 0))


def test_resuming_a_run_that_left_nothing_begins_anew(config):
    with RunDirectory.open(config("resume"), gang=Gang("1@1", 0)) as first:
        first.events.write_text("{}\n")
    with RunDirectory.open(config("resume"), gang=Gang("2@2", 0)) as second:
        assert second.attempt == 0 and not second.events.exists()
