"""The page about loops of one's own: every block runs in two processes, which keep the same weights."""

from pathlib import Path

import pytest
import torch
from torch import distributed

PAGE = Path(__file__).parents[1] / "docs" / "own-loops.md"
FIRST, *BLOCKS = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
TITLES = [part.split("\n")[0] for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]]


def whole(parameter):
    """A parameter, put together if it is sharded."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _rank(rank, folder, code, answers):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/join", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    loader = [(torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)) for _ in range(4)]
    names = {"loader": loader}
    exec(FIRST, names)
    torch._dynamo.config.cache_size_limit = 64
    compile_model = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_model(self, backend="aot_eager")  # inductor takes minutes on a CPU
    make = names["make_step"]

    def seeded():
        torch.manual_seed(0)  # as a loop does that starts from weights
        return make()

    names["make_step"] = seeded
    start = [p.detach().clone() for p in seeded().parameters()]
    exec(code, names)
    step = names["step"]
    weights = [whole(p) for p in step.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(start, weights, strict=True))
    average = names.get("average")
    more = [] if average is None else [p.detach() for p in average.parameters()]
    answers.put((rank, float(names["loss"].detach()), moved / len(start), [w.tolist() for w in [*weights, *more]]))
    distributed.destroy_process_group()


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=TITLES[: len(BLOCKS)])
def test_the_loop_trains_one_model_in_two_processes(number, tmp_path):
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, BLOCKS[number], answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    first, second = sorted((answers.get() for _ in ranks), key=lambda answer: answer[0])
    for process in ranks:
        process.join()
    assert first[1] != second[1]  # other images
    assert first[2] == second[2] == 1  # every parameter learns
    assert first[3] == second[3]  # the same weights


def test_the_blocks_are_those_of_the_sections():
    assert len(BLOCKS) == TITLES.index("Without TokenStep") == 6
