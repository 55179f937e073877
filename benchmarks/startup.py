"""How much longer a job takes to its first rollout than its engine alone takes to its first generation.

    python benchmarks/startup.py [--pairs 3]

Alternating pairs on the demo's model, without warm-up and evaluation: (A) the engine alone, with the command line that
the job would use, from spawn to the first answer; (B) the whole job under torchrun, from launch to the first finished
prompt group. Prints a table and writes benchmarks/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from asyncrl.config.reading.loading import load_config
from asyncrl.demo.model import build
from asyncrl.host.ports import PortAllocator
from asyncrl.inference.engines.ports import OFFSETS, EnginePorts
from asyncrl.inference.sglang.launch import engine_argv, engine_environment

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300.0


def options(model: Path, run: Path) -> list[str]:
    """Returns the command line of a short job: one step, without warm-up, evaluation and export."""
    recipe = str(ROOT / "entrypoints" / "recipes" / "demo.toml")
    chosen = {
        "model.path": model,
        "run.dir": run,
        "warmup.steps": 0,
        "eval.at-start": "false",
        "eval.at-end": "false",
        "eval.every": "none",
        "train.num-steps": 1,
        "run.export": "false",
    }
    return ["@", recipe, *(word for key, value in chosen.items() for word in (f"--{key}", str(value)))]


def engine_alone_s(model: Path, work: Path) -> float:
    """Seconds from spawn to the first answer of /generate."""
    loaded = load_config(options(model, work / "unused"))
    ports = PortAllocator()
    placement = loaded.layout.engines[0]
    engine_ports = EnginePorts.from_base(ports.reserve(OFFSETS))
    argv = engine_argv(
        loaded.config.engine,
        placement,
        engine_ports,
        model_path=model,
        host=loaded.config.run.host,
        device=loaded.layout.device,
        dtype=loaded.layout.dtype,
        context_length=None,
    )
    (work / "tmp").mkdir(exist_ok=True)
    environment = engine_environment(
        loaded.config.engine,
        placement,
        os.environ,
        threads=loaded.layout.engine_threads(placement.engine_id, overlaps=False),
        cores=loaded.machine.cpus,
        scratch=work / "tmp",
    )
    url = f"http://{loaded.config.run.host}:{argv[argv.index('--port') + 1]}/generate"
    ports.close()
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).encode()
    started = time.monotonic()
    with (work / "engine.log").open("ab") as log:
        engine = subprocess.Popen(
            argv, env=os.environ | environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        while time.monotonic() - started < TIMEOUT_S:
            try:
                request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    return time.monotonic() - started
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise TimeoutError(f"the engine did not answer; see {work / 'engine.log'}")
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


def job_s(model: Path, work: Path, number: int) -> float:
    """Seconds from launch to the first finished prompt group."""
    run = work / f"run-{number}"
    events = run / "events.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    started = time.monotonic()
    with (work / "job.log").open("ab") as log:
        job = subprocess.Popen(
            [*launcher, str(ROOT / "entrypoints" / "train.py"), *options(model, run)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        while time.monotonic() - started < TIMEOUT_S:
            if events.exists() and '"group_finished"' in events.read_text():
                return time.monotonic() - started
            if job.poll() not in (None, 0):
                break
            time.sleep(0.05)
        raise TimeoutError(f"the job finished no group; see {work / 'job.log'}")
    finally:
        job.wait(timeout=TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    pairs = parser.parse_args().pairs
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        build(work / "model")
        for number in range(pairs):
            alone, job = engine_alone_s(work / "model", work), job_s(work / "model", work, number)
            rows.append({"engine_alone_s": alone, "job_s": job, "over_s": job - alone})
            print(f"pair {number + 1}: engine alone {alone:6.1f} s   job {job:6.1f} s   over {job - alone:5.1f} s")
    median = statistics.median(row["over_s"] for row in rows)
    print(f"median: {median:.1f} s over the engine alone")
    results = ROOT / "benchmarks" / "results" / "startup.json"
    results.write_text(json.dumps({"cores": os.cpu_count(), "pairs": rows, "median_over_s": median}, indent=2) + "\n")


if __name__ == "__main__":
    main()
