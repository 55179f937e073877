"""What `run_job` puts around a loop, in processes of their own: every end is bounded, and says how it went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.run_directory import RunDirectory
from tests.tiny_model import CONFIG
from tests.tiny_policy import write_policy

GRACE_S = 10.0
SHORT = ("--run.stop-grace-s", "0.6")
"""For what is ended by force."""
BOUND_S = 25.0
"""For a whole process on a busy machine; what hangs below hangs for 120 s."""

PROGRAM = """
import os, signal, sys, threading, time
import anyio
from asyncrl.components import run_job
from asyncrl.errors import TrainerError

async def loop(job):
    job.record.start(0)
    {loop}

{before}
sys.exit(run_job(loop))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    seconds: float
    run_dir: Path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Names a model without weights: nothing here gets as far as reading them."""
    model = write_policy(tmp_path / "model", context_length=512, config={**CONFIG, "model_type": "qwen3"})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[data]\nsource = "{tmp_path}/prompts.jsonl"\n'
        f'[run]\ndir = "{tmp_path}/run"\ndisplay = "plain"\nstop_grace_s = {GRACE_S}\n'
    )
    return path


def a_former_run(recipe: Path) -> Path:
    """A result of a run that lies where the recipe puts its own."""
    with RunDirectory.open(Config.model_validate({"run": {"dir": recipe.parent / "run"}})) as run:
        run.export.mkdir()
    return run.export


def run_loop(recipe: Path, loop: str, *options: str, before: str = "", **environ: str) -> Ended:
    """Runs a job whose loop has the body `loop`, to its end."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(loop=loop, before=before), "@", str(recipe), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ,
    )
    return Ended(done.returncode, done.stdout, time.monotonic() - began, recipe.parent / "run")


def without_stalls(text: str) -> list[str]:
    """What a job said, but for what it said of a machine that does much else."""
    return [line for line in text.splitlines() if "did not run for" not in line and "event loop" not in line]


def last_event(ended: Ended) -> dict[str, object]:
    event: dict[str, object] = json.loads((ended.run_dir / "events.jsonl").read_text().splitlines()[-1])
    return event


@pytest.mark.parametrize("imported", ["anyio", "pydantic", "asyncrl.driver", "asyncrl.run.loop"])
def test_a_signal_while_the_program_is_imported_is_one_line(imported: str) -> None:
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from asyncrl.components import run_job
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "stopped by SIGINT\n")


def test_a_signal_in_code_of_the_user_keeps_its_traceback() -> None:
    handled = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"import asyncrl.errors, os, signal\n{handled}\nos.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == -signal.SIGINT and "Traceback" in done.stderr


FAIL = 'raise TrainerError("the loss has a cold")'
STAY = "threading.Thread(target=time.sleep, args=(120,)).start()"
CLING = "job.disposal.push_async_callback(cling)"
CLINGING = """
async def cling():
    with anyio.CancelScope(shield=True):
        await anyio.sleep(120)
"""


@pytest.mark.parametrize(("end", "code"), [(FAIL, 1), ("pass", 0)], ids=["failed", "finished"])
@pytest.mark.parametrize("what", [STAY, CLING], ids=["a thread stays", "disposal hangs"])
def test_no_end_waits_for_what_does_not_end(recipe: Path, what: str, end: str, code: int) -> None:
    ended = run_loop(recipe, f"{what}; {end}" if end == "pass" else f"{what}\n    {end}", *SHORT, before=CLINGING)
    assert ended.code == code, ended.text
    assert "leaves by force: shutdown took longer than 3 s" in ended.text
    if what is CLING:
        assert ("after: TrainerError: the loss has a cold" in ended.text) == (end == FAIL)
    else:
        assert ("error: the loss has a cold" in ended.text) == (end == FAIL)
        assert last_event(ended)["exit_code"] == code


def test_a_process_does_not_wait_for_a_call_that_never_returned(recipe: Path) -> None:
    stuck = "threading.Thread(target=time.sleep, args=(120,), name='may not return: broadcast').start()"
    ended = run_loop(recipe, stuck)
    assert ended.code == 0 and "leaves by force" not in ended.text, ended.text
    assert last_event(ended)["exit_code"] == 0


def test_a_failure_beside_the_loop_bounds_a_loop_that_cannot_be_cancelled(recipe: Path) -> None:
    loop = f"job.task_group.start_soon(fail)\n    await cling()\n{CLINGING}\nasync def fail():\n    {FAIL}\n"
    ended = run_loop(recipe, loop, *SHORT)
    assert ended.code == 1 and "leaves by force" in ended.text, ended.text


def test_a_destructor_that_hangs_is_ended_by_the_kernel(recipe: Path) -> None:
    before = "class Stuck:\n    def __del__(self, sleep=time.sleep): sleep(120)\nthreading.stuck = Stuck()"
    ended = run_loop(recipe, FAIL, *SHORT, before=before)
    assert ended.code == -signal.SIGALRM and "error: the loss has a cold" in ended.text


@pytest.mark.parametrize("signum", ["SIGUSR1", "SIGINT", "SIGTERM"])
def test_a_signal_during_the_summary_does_not_cost_it(recipe: Path, signum: str) -> None:
    before = f"""
import asyncrl.driver
conclude = asyncrl.driver.conclude
def interrupted(*args, **how):
    os.kill(os.getpid(), signal.{signum})
    conclude(*args, **how)
asyncrl.driver.conclude = interrupted
"""
    former = a_former_run(recipe)
    ended = run_loop(recipe, "pass", "--run.if-exists", "overwrite", before=before)
    assert ended.code == 0 and "finished" in ended.text and not former.exists(), ended.text
    assert json.loads((ended.run_dir / "summary.json").read_text())["outcome"] == "finished"


SAVE = '(job.directory.path / "checkpoints" / "step-000003").mkdir(parents=True)'
"""What a signal saves of a step that no stage has recorded."""


@pytest.mark.parametrize(("steps", "saved"), [(0, False), (0, True), (3, False), (3, True)])
def test_a_job_that_fails_leaves_what_it_has_trained_or_the_run_that_it_was_to_overwrite(
    recipe: Path, steps: int, saved: bool
) -> None:
    """Steps that it has not trained itself, but taken from another run's checkpoint, are not its own."""
    former = a_former_run(recipe)
    loop = f"job.record.start(5, {steps}); {SAVE if saved else 'pass'}; {FAIL}"
    ended = run_loop(recipe, loop, "--run.if-exists", "overwrite")
    assert former.exists() != saved != ("run holds the former run again" in ended.text)
    assert (ended.run_dir / "checkpoints").exists() == saved
    assert ended.code == 1 and ended.text.endswith("error: the loss has a cold\n"), ended.text
    summary = ended.run_dir / ("." if saved else "failed-start") / "summary.json"
    assert summary.exists() == bool(steps)
    if steps:
        record = json.loads(summary.read_text())
        assert (record["outcome"], record["steps"], record["export"]) == ("the loss has a cold", 3, None)


def test_the_step_that_a_signal_saves_is_of_a_run_that_a_resume_goes_on_with(recipe: Path) -> None:
    former = a_former_run(recipe)
    before = f"async def save(job):\n    {SAVE}"
    loop = """
    from functools import partial
    job.on_stop_now.append(partial(save, job))
    os.kill(os.getpid(), signal.SIGINT)
    await anyio.sleep_forever()"""
    ended = run_loop(recipe, loop, "--run.if-exists", "overwrite", before=before)
    assert ended.code == 128 + signal.SIGINT and "former run" not in ended.text, ended.text
    assert (ended.run_dir / "checkpoints" / "step-000003").exists() and not former.exists()


def test_a_second_signal_during_the_summary_ends_it(recipe: Path) -> None:
    before = """
import asyncrl.driver
def interrupted(*args, **how):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.8)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(120)
asyncrl.driver.conclude = interrupted
"""
    ended = run_loop(recipe, "pass", "--run.stop-grace-s", "29", before=before)
    assert ended.code == 128 + signal.SIGINT and "SIGINT while stopping" in ended.text, ended.text


def test_ctrl_c_before_the_loop_is_a_word_and_no_traceback(recipe: Path, tmp_path: Path) -> None:
    # A process that a shell started in the background ignores SIGINT, and its children do.
    (tmp_path / "slow_model.py").write_text(
        "import os, signal\n"
        "def build(path):\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ended = run_loop(
        recipe,
        "pass",
        *("--model.path", str(tmp_path / "not-yet"), "--model.builder", "slow_model:build"),
        PYTHONPATH=str(tmp_path),
    )
    assert (ended.code, ended.text) == (128 + signal.SIGINT, "stopped by SIGINT\n")


def test_other_ranks_keep_the_grace_of_the_configuration(recipe: Path) -> None:
    before = """
import asyncrl.driver
def serve(loaded):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(120)
asyncrl.driver._serve = serve
"""
    rank_1 = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    ended = run_loop(recipe, "pass", "--run.stop-grace-s", "0.1", before=before, **rank_1)
    assert ended.code == 128 + signal.SIGTERM and "rank 0 did not end the job after SIGTERM" in ended.text, ended.text
    assert ended.seconds < 12.0  # with the default grace it would be 13 s after the signal


def test_a_stop_is_answered_at_once_and_has_the_last_word(recipe: Path) -> None:
    loop = "time.sleep(0); os.kill(os.getpid(), signal.SIGTERM); await anyio.sleep(60)"
    ended = run_loop(recipe, loop, "--run.stop-grace-s", "20")
    first, answer, last = without_stalls(ended.text)
    assert first == f"run directory: {ended.run_dir}"
    assert answer == "SIGTERM: stopping, within 20 s; a second signal leaves by force"
    assert (ended.code, last) == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_what_is_to_be_kept_gets_half_of_the_grace_before_anything_is_disposed_of(recipe: Path) -> None:
    before = """
def say(text):
    os.write(1, f"{text}\\n".encode())
async def keep():
    say("keeping")
    try:
        await anyio.sleep(120)
    finally:
        say(f"kept until {time.monotonic() - began}")
async def dispose():
    say("disposing")
"""
    loop = """
    global began
    job.on_stop_now.append(keep)
    job.disposal.push_async_callback(dispose)
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await anyio.sleep(60)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1)
"""
    ended = run_loop(recipe, loop, before=before)
    assert ended.code == 128 + signal.SIGTERM, ended.text
    told = [line for line in ended.text.splitlines() if line.startswith(("keeping", "kept", "disposing", "stopped"))]
    keeping, kept, *rest = told
    assert [keeping, *rest] == ["keeping", "disposing", "stopped by SIGTERM"]
    assert GRACE_S / 2 <= float(kept.removeprefix("kept until ")) < GRACE_S - 1, "the loop's own end is of that half"


@pytest.mark.parametrize("when", ["asyncrl.driver.RunDirectory.open", "asyncrl.driver.conclude"])
def test_a_graceful_stop_kills_nobody_before_or_after_the_loop(recipe: Path, when: str) -> None:
    before = f"""
import asyncrl.driver
def signalled(*args, meant={when}, **kwargs):
    os.kill(os.getpid(), signal.SIGUSR1)
    return meant(*args, **kwargs)
{when} = signalled
"""
    ended = run_loop(recipe, "print('asked:', job.stop.requested)", before=before)
    assert ended.code == 0, ended.text
    assert f"asked: {when.endswith('open')}" in ended.text


HOLDING = "import re; re.match('(a+)+$', 'a' * 60 + 'b')"  # for years, and holds the interpreter's lock


@pytest.mark.parametrize("signalled", ["while it hangs", "before it hangs"])
def test_a_job_whose_interpreter_is_held_ends_within_15_s_of_a_stop_signal(recipe: Path, signalled: str) -> None:
    if signalled == "while it hangs":
        hold = f"threading.Thread(target=lambda: exec({HOLDING!r}), daemon=True).start()"
        kill = "subprocess.Popen(['sh', '-c', f'sleep 1; kill -INT {os.getpid()}'])"
        loop = f"import subprocess; {kill}; {hold}; await anyio.sleep(60)"
    else:
        loop = f"""
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await anyio.sleep(60)
    finally:
        exec({HOLDING!r})
"""
    ended = run_loop(recipe, loop, "--run.stop-grace-s", "3")
    assert ended.code == -signal.SIGKILL, ended.text
    assert "rank 0 is ended by force: it still runs 4.5 s after a stop signal" in ended.text
    assert ended.seconds < 20  # 3 + 1.5 + 0.5, and the start


def test_a_stopped_job_does_not_wait_for_what_a_thread_still_imports(recipe: Path) -> None:
    loop = f"{STAY}; os.kill(os.getpid(), signal.SIGTERM); await anyio.sleep(60)"
    ended = run_loop(recipe, loop, "--run.stop-grace-s", "29")
    assert ended.code == 128 + signal.SIGTERM and ended.seconds < BOUND_S
    assert ended.text.splitlines()[-1] == "stopped by SIGTERM"


def test_a_builder_that_raises_is_one_message(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("def build(path): raise TypeError('no such size')\n")
    new = ("--model.path", str(tmp_path / "not-yet"), "--model.builder", "broken_model:build")
    ended = run_loop(recipe, "pass", *new, PYTHONPATH=str(tmp_path))
    assert ended.code == 1 and "Traceback" not in ended.text
    assert ended.text.startswith("error: model.builder: broken_model:build failed to make ")
    assert "TypeError: no such size" in ended.text and "broken_model.py:1 in build" in ended.text


OF_MINE = """
import functools

def broken_at_call(sample, prompt, weight): ...

def checked(function):
    @functools.wraps(function)
    def score(*args, **kwargs):
        return function(*args, **kwargs)
    return score

@checked
def decorated(completions, **kwargs): ...
"""


@pytest.mark.parametrize(
    ("options", "config", "text"),
    [
        (("--run.dir", "/proc/x"), {}, "cannot use /proc/x"),
        (("--reward.function", "json:lods"), {}, "'json' has no 'lods'"),
        (("--eval.function", "json:lods"), {}, "eval.function: 'json' has no 'lods'"),
        (("--eval.function", "os:getcwd"), {}, "is called as (hf_dir, **eval.function_args), which it does not take"),
        (("--train.algorithm", "json:dumps"), {}, "train.algorithm: json:dumps cannot be made with"),
        ((), {"model_type": "gpt2"}, 'model_type "gpt2" cannot be trained'),
        (("--reward.function", "of_mine:broken_at_call"), {}, "reward.args: of_mine:broken_at_call is called as"),
        (("--reward.function", "of_mine:decorated"), {}, "(completions, **kwargs), as TRL and verifiers call a reward"),
        (("--rollout.filters", "fails_to_import:judge"), {}, "ZeroDivisionError"),
        (("--data.source", "fails_to_import:prompts"), {}, "ZeroDivisionError"),
        (("--rollout.max-new-tokens", "4"), {"max_position_embeddings": 7}, "leave no room for a prompt"),
    ],
)
def test_a_dry_run_refuses_what_the_start_would(
    recipe: Path, options: tuple[str, ...], config: dict[str, str], text: str
) -> None:
    path = recipe.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    (recipe.parent / "of_mine.py").write_text(OF_MINE)
    (recipe.parent / "fails_to_import.py").write_text("def judge(group): ...\ndef prompts(): ...\n1 / 0\n")
    ended = run_loop(recipe, "pass", "--dry-run", *options, PYTHONPATH=str(recipe.parent))
    assert ended.code != 0 and text in ended.text, ended.text
    assert not ended.run_dir.exists()


LIMITS = """
from asyncrl.config.layout import DRIVER_NODE
from asyncrl.host import ProcessSpec
import resource
spec = ProcessSpec(
    name="child", argv=("/bin/sh", "-c", "ulimit -Sn"), env={}, log_path=str(job.directory.logs / "child.log")
)
await job.hosts[DRIVER_NODE].spawn(spec)
exited = await job.hosts[DRIVER_NODE].wait("child")
print("driver", resource.getrlimit(resource.RLIMIT_NOFILE)[0], "child", exited.log_tail.split()[-1])
""".strip().replace("\n", "\n    ")


def test_a_job_and_its_processes_may_open_as_many_files_as_the_machine_allows(recipe: Path) -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 3000))"
    ended = run_loop(recipe, LIMITS, before=before)
    assert "driver 3000 child 3000" in ended.text, ended.text


def test_requests_for_which_no_limit_has_room_are_refused_with_the_numbers(recipe: Path) -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    ended = run_loop(recipe, "pass", "--rollout.concurrency", "768", "--dry-run", before=before)
    assert ended.code == 2, ended.text
    assert "768 requests in flight need 1664 open files in the router" in ended.text
    assert "allows a process 1024" in ended.text and "use at most 448" in ended.text
    assert run_loop(recipe, "pass", "--rollout.concurrency", "448", "--dry-run", before=before).code == 0


STANDS_STILL = """
from asyncrl.config.layout import DRIVER_NODE
from asyncrl.host import ProcessSpec
host = job.hosts[DRIVER_NODE]
spec = ProcessSpec(name="child", argv=("sleep", "120"), env={}, log_path=str(job.directory.logs / "child.log"))
print("pids", host.pid, await host.spawn(spec), flush=True)
os.kill(host.pid, signal.SIGSTOP)
job.disposal.push_async_callback(cling)
os.kill(os.getpid(), signal.SIGTERM)
await anyio.sleep(120)
""".strip().replace("\n", "\n    ")


def test_what_leaves_by_force_leaves_nothing_although_the_host_stands_still(recipe: Path) -> None:
    ended = run_loop(recipe, STANDS_STILL, *SHORT, before=CLINGING)
    assert "leaves by force" in ended.text, ended.text
    told = next(line for line in ended.text.splitlines() if line.startswith("pids"))
    deadline = time.monotonic() + BOUND_S
    while any(alive(int(pid)) for pid in told.split()[1:]):
        assert time.monotonic() < deadline, "host or child lives on"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
