"""Ten thousand random schedules of requests whose drafts a model's own head proposes. Every answer
must be the one without drafts.

    python -m tests.torture.draft_heads [--schedules 10000] [--first 0]

The models are a tiny GLM-4.5, DeepSeek V3 and Qwen3.5, on the compiled kernels; half of the
schedules use heads that are sometimes right, and half heads that are always right. The exit code is
1 if any answer differs; the seed of its schedule is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from tests.support.head_schedules import DraftedModel, HeadSchedule

MODEL_TYPES = ("glm4_moe", "deepseek_v3", "qwen3_5_text")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wrong, accepted, preempted, replaced = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        models = []
        for model_type, is_right in product(MODEL_TYPES, (False, True)):
            path = Path(folder) / f"{model_type}-{is_right}"
            path.mkdir()
            models.append(DraftedModel.of(path, model_type, is_right=is_right))
        for seed in range(args.first, args.first + args.schedules):
            schedule = HeadSchedule(models[seed % len(models)], seed)
            try:
                schedule.run()
            except AssertionError as error:
                wrong.append(seed)
                print(f"schedule {seed}: {str(error)[:500]}", flush=True)
            accepted += schedule.accepted
            preempted += schedule.preempted
            replaced += schedule.replaced
            if (seed + 1) % 500 == 0:
                print(f"{seed + 1 - args.first} schedules, {len(wrong)} wrong", flush=True)
    print(
        f"{args.schedules} schedules: {len(wrong)} wrong; {accepted} drafts accepted, "
        f"{preempted} preemptions, {replaced} engines replaced"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
