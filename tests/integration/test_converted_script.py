"""A script with a converted model runs with the servers of a job, and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch import nn

from persia.nn import slots_for
from persia.utils import dump_yaml

LAUNCHER = (sys.executable, "-m", "persia.launcher")

SCRIPT = """
import sys
import torch
from torch import nn
from persia.embedding.optim import Adagrad
from persia.nn import convert, job_servers

torch.manual_seed(0)
with job_servers() as servers:
    embedding = nn.Embedding(100, 4)
    model = nn.Sequential(convert(embedding, Adagrad(lr=0.1), servers=servers), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        loss = model(torch.randint(0, 100, (32,))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with open(sys.argv[1], "w") as file:
    print(f"{loss.item():.5f} {type(servers).__name__}", file=file)
"""


def test_one_script_with_and_without_a_job(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "slots.yml"
    script.write_text(SCRIPT)
    dump_yaml(slots_for(nn.Embedding(100, 4)), str(config))
    job = [*LAUNCHER, "local", "--nn-worker", str(script), "--embedding-config", str(config)]
    commands = [[sys.executable, str(script)], [*job, "--parameter-servers", "2", "--"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERSIA_")}
    outputs = []
    for number, command in enumerate(commands):
        output = tmp_path / str(number)
        done = subprocess.run(
            [*command, str(output)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(output.read_text().split())
    assert outputs[0][0] == outputs[1][0]
    assert [where for _, where in outputs] == ["NoneType", "Servers"]
