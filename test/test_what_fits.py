"""What fits: what is told is what training holds, and wrong calls end with 2."""

import json

import pytest
import torch
from benchmarks import fits
from torch import nn
from what_fits import __main__ as command
from what_fits import page


WIDTH, ROWS = 64, 512
pytestmark = pytest.mark.usefixtures("alone")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net(batch):
    return Net(), (torch.randn(batch * ROWS, WIDTH),)


def alone():
    return net(1)


MODEL = f"{__name__}:net"


def task(*words, batch=2, way=page.OURS):
    asked = vars(command.options().parse_args(["--model", MODEL, *words]))
    return {"batch": batch, "length": None, "way": way, "_asked": asked}


def test_what_is_told_is_what_the_allocator_notes():
    row = fits.measure({"net": MODEL, "kind": "blocks", "batch": 2})
    (mark,) = fits.judged([{**row, "net": MODEL, "kind": "blocks"}])
    assert mark.passed and mark.enforced
    first, *_, last = row["steps"]
    assert last["told"] < first["told"]


@pytest.mark.parametrize("optimizer, states", [("SGD", 0), ("AdamW", 2)])
def test_what_is_there_when_a_step_starts(optimizer, states):
    words = ["--optimizer", optimizer, "--blocks"]
    step, *_ = page.steps_of(task(*words))
    module, (inputs,) = net(2)
    parameters = sum(each.nbytes for each in module.parameters())
    wanted = (1 + states) * parameters + inputs.nbytes
    # And the number of the step, for each parameter.
    assert step["given"] == pytest.approx(wanted, abs=256)
    # With the gradients.
    assert step["peak"] > parameters


def test_the_answer(tmp_path, capsys):
    """The batch fits by a budget alone; what is printed is stored."""
    stored = tmp_path / "fits.json"
    words = ["--model", MODEL, "--batch", "4", "--json", str(stored)]
    assert command.main([*words, "--memory", "20MB"]) == 0
    printed, data = capsys.readouterr().out, json.loads(stored.read_text())
    assert stored.with_suffix(".svg").read_text().count("<path") > 10
    _, (size,) = page.sizes_of(data)
    assert "operator by operator" in printed and "Leave 1.907 MiB free" in printed
    assert "without a budget none" in printed and "with this set 4." in printed
    left = 20_000_000 - size.base["given"]
    assert f"activation_memory_peak_bytes = {left}" in printed
    assert size.within(size.upstream[:1]) is None
    plan = size.ours[-1]
    assert page.total(plan) <= 20_000_000 and plan["flops"] > size.base["flops"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--model", "no_such_net"], "no model named 'no_such_net'"),
        (["--model", "no_such_module:net"], "ModuleNotFoundError"),
        (["--model", f"{__name__}:alone", "--batch", "2"], "TypeError: too many"),
        (["--model", MODEL], "missing a required argument: 'batch'"),
        (["--model", "vit", "--batch", "2"], "vit has a batch of its own"),
        (["--model", "transformers:WhisperModel"], "takes input_features"),
        (["--batch", "2,0"], "'2,0' is not like 1,2,4"),
        (["--batch", "2", "--memory", "lots"], "'lots' is no size"),
        (["--batch", "2", "--memory", "24Gb"], "'24Gb' is no size"),
        (["--batch", "2", "--blocks", r"layer\d"], "no submodule's name is matched"),
        (["--batch", "2", "--fsdp", "8"], "name them by --blocks"),
        (["--batch", "2,4", "--length", "2,4"], "only one of them can vary"),
        (["--batch", "2", "--gpu", "h100"], "TORCH_VERSION=2.15.0"),
    ],
)
def test_wrong_calls(words, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit) as ended:
        command.main([*([] if "--model" in words else ["--model", MODEL]), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_model_of_a_library_by_its_class():
    sizes = ["n_layer=2", "n_embd=64", "n_head=4", "vocab_size=128"]
    words = ["--model", "transformers:GPT2LMHeadModel", "--dtype", "bfloat16"]
    gpt2 = page.net_of(task(*words, "--config", *sizes))
    _, module, (ids, labels) = gpt2.fake()
    assert ids.shape == labels.shape == (2, 1024)
    assert len(module.module.transformer.h) == 2
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
