"""What fits: what is told is what training holds, and wrong calls end with 2."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks import catalogue, fits
from conftest import called
from torch import nn
from what_fits import __main__ as command
from what_fits import answer, page, picture


SCRIPT = Path(command.REPOSITORY, "scripts", "what_fits.sh")
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
    """The batch fits by a budget alone; what is printed is stored, and keeps room."""
    stored = tmp_path / "fits.json"
    words = ["--model", MODEL, "--batch", "4", "--json", str(stored), "--compare"]
    asked = command.checked([*words, "--memory", "20MB", "--headroom", "2MB"])
    assert answer.answered(asked) == 0
    assert not gc.get_freeze_count()
    printed, data = capsys.readouterr().out, json.loads(stored.read_text())
    assert stored.with_suffix(".svg").read_text().count("<path") > 10
    _, (size,) = page.sizes_of(data)
    assert "operator by operator" in printed and "name yours by --gpu" in printed
    assert "without a budget none" in printed and "with this set 4," in printed
    assert "upstream's lowest" in printed
    left = 18_000_000 - size.base["given"]
    assert f"activation_memory_peak_bytes = {left}" in printed
    assert size.within([]) is None
    plan = size.ours[-1]
    assert page.total(plan) <= 18_000_000 and plan["flops"] > size.base["flops"]
    fixed = picture.fixed_of(size.base)
    assert sum(fixed.values()) == size.base["given"]
    assert fixed["optimizer"] == pytest.approx(2 * fixed["parameters"], abs=256)


def test_the_lines_to_paste_leave_the_headroom_free():
    asked = task("--blocks", "--memory", "10GiB", "--headroom", "20%")["_asked"]
    base = {"given": 2**30, "peak": 2**32, "flops": 1.0}
    (size,) = page.sizes_of(
        {
            "asked": asked,
            "measured": [
                {"batch": 1, "length": None, "way": way, "steps": [base]}
                for way in (page.PLAIN, page.OURS)
            ],
        }
    )[1]
    assert f"device_bytes={8 * 2**30})" in page.paste(asked, [size])
    assert "20 % of 10 GiB is left free" in page.leaves(asked)


# ------------------------------------------------------------ other people's models


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}
TEXT = {**SMALL, "intermediate_size": 128, "vocab_size": 256}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 256}
DISTIL = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 128, "vocab_size": 256}
HALVES = {
    f"{half}_{size}": n
    for half in ("encoder", "decoder")
    for size, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 128))
}
BART = {**HALVES, "d_model": 64}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 256}
IMAGE = {**SMALL, "intermediate_size": 128}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}
LIBRARIES = {
    "GPT2LMHeadModel": (GPT2, 1024),
    "LlamaForCausalLM": (GROUPED, 1024),
    "MistralForCausalLM": (GROUPED, 1024),
    "Qwen2ForCausalLM": (GROUPED, 1024),
    "Qwen3ForCausalLM": (GROUPED, 1024),
    "Gemma2ForCausalLM": (GROUPED, 1024),
    "Phi3ForCausalLM": ({**GROUPED, "pad_token_id": 0}, 1024),
    "OPTForCausalLM": ({**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}, 1024),
    "GPTNeoXForCausalLM": (TEXT, 1024),
    "BloomForCausalLM": (
        {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 256},
        1024,
    ),
    "AutoModelForCausalLM": ({**GROUPED, "model_type": "llama"}, 1024),
    "BertForMaskedLM": (TEXT, 512),
    "RobertaForMaskedLM": ({**TEXT, "max_position_embeddings": 514}, 512),
    "DistilBertForMaskedLM": (DISTIL, 512),
    "ModernBertForMaskedLM": ({**TEXT, "pad_token_id": 0}, 1024),
    "ElectraForPreTraining": (TEXT, 512),
    "BertForPreTraining": (TEXT, 512),
    "BertModel": (TEXT, 512),
    "BertForSequenceClassification": ({**TEXT, "num_labels": 3}, 512),
    "RobertaForSequenceClassification": (TEXT, 510),
    "LlamaForSequenceClassification": (GROUPED, 1024),
    "BertForTokenClassification": (TEXT, 512),
    "DistilBertForTokenClassification": (DISTIL, 512),
    "BertForQuestionAnswering": (TEXT, 512),
    "BertForMultipleChoice": (TEXT, 2),
    "T5ForConditionalGeneration": (T5, 1024),
    "BartForConditionalGeneration": (BART, 1024),
    "M2M100ForConditionalGeneration": (BART, 1024),
    "ViTForImageClassification": (IMAGE, 3),
    "SwinForImageClassification": (
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
        3,
    ),
    "ConvNextForImageClassification": (STAGES, 3),
    "ResNetForImageClassification": (
        {**STAGES, "embedding_size": 16, "layer_type": "basic"},
        3,
    ),
    "SegformerForSemanticSegmentation": (STAGES, 3),
    "WhisperForConditionalGeneration": (BART, 80),
    "Wav2Vec2ForSequenceClassification": (IMAGE, 16000),
    "ASTForAudioClassification": (IMAGE, 1024),
    "CLIPModel": (
        {"text_config.num_hidden_layers": 1, "vision_config.num_hidden_layers": 1},
        77,
    ),
}
DOWN, UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
CROSS_DOWN, CROSS_UP = ("CrossAttnDownBlock2D",), ("CrossAttnUpBlock2D",)
DENOISERS = {
    "UNet2DModel": {
        "block_out_channels": (32, 32),
        "down_block_types": DOWN,
        "up_block_types": UP,
    },
    "UNet2DConditionModel": {
        "block_out_channels": (32,),
        "down_block_types": CROSS_DOWN,
        "up_block_types": CROSS_UP,
        "cross_attention_dim": 32,
    },
    "DiTTransformer2DModel": {"num_layers": 1},
    "SD3Transformer2DModel": {"num_layers": 1, "sample_size": 32},
    "PixArtTransformer2DModel": {
        "num_layers": 1,
        "sample_size": 32,
        "caption_channels": 64,
    },
}


def loss_of(spec, **settings):
    """A forward by fake tensors, and its inputs."""
    mode, module, inputs = catalogue.find(spec, 2, **settings).fake()
    with mode:
        loss = module(*inputs)
    assert loss.numel() == 1 and loss.requires_grad
    assert {len(each) for each in inputs} == {2}
    return inputs


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_model_of_transformers_by_its_class(kind):
    settings, length = LIBRARIES[kind]
    first, *_ = loss_of(f"transformers:{kind}", **settings)
    assert first.shape[1] == length


@pytest.mark.parametrize("kind", DENOISERS)
def test_a_model_of_diffusers_by_its_class(kind):
    noise, noisy, *_ = loss_of(f"diffusers:{kind}", **DENOISERS[kind])
    assert noise.shape[2:] == noisy.shape[2:]


def test_sizes_and_dtype_of_a_model_of_transformers():
    words = ["--model", "transformers:GPT2LMHeadModel", "--dtype", "bfloat16"]
    sizes = [f"{name}={value}" for name, value in {**GPT2, "n_layer": 2}.items()]
    gpt2 = page.net_of(task(*words, "--config", *sizes))
    _, module, (ids, labels) = gpt2.fake()
    assert ids.shape == labels.shape == (2, 1024)
    assert len(module.module.transformer.h) == 2
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}


# ------------------------------------------------------------------ own functions

OWN = """
import dataclasses
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x, scale=None):
        return self.how(self.inner(x))

@dataclasses.dataclass
class Output:
    loss: object
    logits: object = None

def made(how, *inputs):
    return Head(how), inputs or (torch.randn(2, 4),)

def fail(y):
    raise KeyError("no such head")

as_loss = lambda batch: made(lambda y: y.mean())
as_tuple = lambda batch: made(lambda y: (y.mean(), y))
as_dict = lambda batch: made(lambda y: {"loss": y.mean(), "logits": y})
as_output = lambda batch: made(lambda y: Output(y.mean()))
as_named = lambda batch: (Head(lambda y: y.mean()), {"x": torch.randn(2, 4)})
as_tensor = lambda batch: (Head(lambda y: y.mean()), torch.randn(2, 4))

as_logits = lambda batch: made(lambda y: y)
as_none = lambda batch: made(lambda y: None)
as_other_dict = lambda batch: made(lambda y: {"logits": y, "hidden": y})
as_lossless = lambda batch: made(lambda y: Output(None))
as_logits_first = lambda batch: made(lambda y: (y, y.mean()))
as_count = lambda batch: made(lambda y: y.argmax())
as_raised = lambda batch: made(fail)
as_value = lambda batch: made(lambda y: y.mean() * y.sum().item())
as_constant = lambda batch: made(lambda y: y.mean().detach())
as_wrong_shape = lambda batch: made(lambda y: y.mean(), torch.randn(2, 5))
as_flag = lambda batch: made(lambda y: y.mean(), torch.randn(2, 4), True)
as_module = lambda batch: Head(lambda y: y.mean())
as_function = lambda batch: (torch.sin, (torch.randn(2),))
as_text = lambda batch: (Head(lambda y: y.mean()), "x")
as_nothing = lambda batch: None
number = 3

def no_batch():
    pass

def broken(batch):
    return undefined
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder, with a module in it."""
    (tmp_path / "my_nets.py").write_text(OWN)
    (tmp_path / "my_syntax.py").write_text("def net(:\n")
    (tmp_path / "my_imports.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_nets", "my_syntax", "my_imports"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name", ["as_loss", "as_tuple", "as_dict", "as_output", "as_named", "as_tensor"]
)
def test_what_an_own_model_may_return(own, name):
    loss_of(f"my_nets:{name}")


OWN_FAULTS = [
    ("as_logits", "a tensor of shape [2, 4], float32 where its loss is needed"),
    ("as_none", "Head returned None where its loss is needed"),
    ("as_other_dict", "a dict of logits, hidden where"),
    ("as_lossless", "Head returned a Output where"),
    ("as_logits_first", "a tuple that begins with a tensor of shape [2, 4]"),
    ("as_count", "a tensor of shape [], int64 where"),
    ("as_raised", "KeyError: 'no such head' (", "my_nets.py:23)"),
    ("as_value", "it asks for the values of tensors", "my_nets.py:"),
    ("as_constant", "depends on no parameter that is trained"),
    ("as_wrong_shape", "RuntimeError: ", "my_nets.py:12)"),
    ("as_flag", "input 1 of my_nets:as_flag is a bool, not a tensor"),
    ("as_module", "returned a Head, not (model, inputs)"),
    ("as_function", "returned a builtin_function_or_method where its model is needed"),
    ("as_text", "returned a str where its inputs are needed"),
    ("as_nothing", "returned None, not (model, inputs)"),
    ("as_los", "my_nets has no as_los; did you mean as_loss?"),
    ("number", "my_nets:number is no function, but a int"),
    ("no_batch", "cannot take a batch: too many positional arguments"),
    ("broken", "NameError: name 'undefined' is not defined (", "my_nets.py:53)"),
]


@pytest.mark.parametrize("name, said", [(name, said) for name, *said in OWN_FAULTS])
def test_what_is_wrong_with_an_own_model(own, name, said, refused):
    error = refused("--model", f"my_nets:{name}", "--batch", "2")
    assert all(each in error for each in said)


# ------------------------------------------------------------------- wrong calls


@pytest.fixture
def refused(capsys):
    """What a wrong call says as it ends with 2, before anything is measured."""

    def check(*words):
        with pytest.raises(SystemExit) as ended:
            model = [] if "--model" in words else ["--model", MODEL]
            answer.answered(command.checked([*model, *words]))
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert "Traceback" not in error
        return error.rpartition("what_fits.sh: error: ")[2]

    return check


BERT = ["--model", "transformers:BertForMaskedLM", "--batch", "2"]
MODELS = [
    (["--model", "no_such_net"], "no model named 'no_such_net'"),
    (["--model", "vitt", "--batch", "2"], "did you mean vit?"),
    (["--model", "no_such_module:net"], "there is no module no_such_module in "),
    (["--model", ":net"], "no model named ':net'"),
    (["--model", "my_syntax:net"], "my_syntax does not import: SyntaxError"),
    (["--model", "my_imports:net"], "No module named 'no_such_library' ("),
    (["--model", MODEL], "cannot take nothing; pass --batch"),
    (["--model", MODEL, "--batch", "2", "--length", "8"], "a batch and a length"),
    (["--model", "vit", "--batch", "2"], "vit has a batch of its own"),
    (["--model", MODEL, "--batch", "2", "--config", "width=2"], "no configuration"),
    (["--model", "transformers:BertForMaskdLM"], "did you mean BertForMaskedLM?"),
    (["--model", "transformers:BertConfig"], "is no class of a model"),
    (["--model", "transformers:AutoModelForCausalLM"], "--config model_type=llama"),
    (["--model", "transformers:YolosForObjectDetection"], "write a function"),
    (["--model", "diffusers:UNet3D"], "diffusers has no UNet3D"),
    (
        [*BERT, "--config", "num_hiden_layers=2"],
        "BertConfig has no num_hiden_layers; did you mean num_hidden_layers?",
    ),
    ([*BERT, "--config", "hidden_size=65"], "BertForMaskedLM: ValueError: "),
    ([*BERT, "--length", "513"], "has positions for 512 tokens, not 513"),
    (["--batch", "2", "--blocks", r"layer\d"], "no submodule's name is matched"),
    (["--batch", "2", "--gpu", "h100"], "TORCH_VERSION=2.15.0"),
    (["--gpu", "h100", "--headroom", "100GiB"], "not less than the memory of --gpu"),
]


@pytest.mark.parametrize("words, said", MODELS)
def test_models_that_there_are_not(words, said, own, refused, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert said in refused(*words)


OPTIONS = [
    ([], "the following arguments are required: --model"),
    (["--model"], "--model: expected one argument"),
    (["--batch", "2,0"], "'2,0' is not like 1,2,4"),
    (["--batch", "two"], "'two' is not like 1,2,4"),
    (["--length", "-1"], "'-1' is not like 1,2,4"),
    (["--batch", "2,4", "--length", "2,4"], "only one of them can vary"),
    (["--memory", "lots"], "'lots' is no size"),
    (["--memory", "0"], "'0' is no size"),
    (["--memory", "24Gbit"], "'24Gbit' is no size"),
    (["--headroom", "100%"], "'100%' is neither a share"),
    (["--headroom", "10"], "'10' is neither a share"),
    (["--headroom", "some"], "'some' is no size"),
    (["--memory", "1GiB", "--headroom", "2GiB"], "--headroom is not less than"),
    (["--gpu", "h1000"], "invalid choice: 'h1000'"),
    (["--blocks", "("], "'(' is no regular expression"),
    (["--config", "n_layer"], "'n_layer' is not like num_hidden_layers=16"),
    (["--config", "n_layer="], "'n_layer=' is not like num_hidden_layers=16"),
    (["--dtype", "float64"], "invalid choice: 'float64'"),
    (["--optimizer", "LBFGS"], "invalid choice: 'LBFGS'"),
    (["--fsdp", "8"], "name them by --blocks"),
    (["--fsdp", "1", "--blocks"], "'1' is no number of GPUs"),
    (["--bacth", "8"], "unrecognized arguments: --bacth 8"),
    (["--comp"], "unrecognized arguments: --comp"),
    (["--json", "no/such/fits.json"], "there is no folder no/such"),
    (["--json", "."], "is a folder"),
    (["--json", "fits.svg"], "that is the name of its picture"),
    (["--json", "/proc/fits.json"], "nothing can be written there"),
    (["--python", "no-such-python"], "there is no such program"),
    (["--python", "true"], "it is no Python"),
]


@pytest.mark.parametrize("words, said", OPTIONS)
def test_wrong_options_are_told_before_torch_is_imported(words, said, tmp_path):
    model = ["--model", "my:net"] if words and "--model" not in words else []
    code = (
        "import sys; from what_fits import __main__ as command\n"
        "try: sys.exit(command.main())\n"
        "finally: assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(command.REPOSITORY / "scripts")}
    python = [sys.executable, "-P", "-c", code]
    done = called(*python, *model, *words, env=environment, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "word, said", [("--help", "--headroom"), ("--version", "2.11.0 to 2.15.0")]
)
def test_what_is_answered_without_an_environment(word, said, tmp_path):
    # No such torch can be set up.
    environment = {**os.environ, "TORCH_VERSION": "0.0.1"}
    done = called("bash", SCRIPT, word, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and said in done.stdout and not done.stderr


def test_headroom():
    assert [*map(command.headroom, ("10%", "0.25", "0", "2GiB"))] == [
        *(0.1, 0.25, 0),
        2 * 2**30,
    ]


SLOW = """
import os, time
from pathlib import Path

def measure(task):
    Path(task["place"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_measures(number, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    place = tmp_path / "pid"
    code = (
        "from benchmarks import fresh\n"
        "from what_fits import __main__ as command\n"
        "command.heed_signals()\n"
        f"fresh.measured('slow', {{'place': {str(place)!r}}})"
    )
    path = os.pathsep.join([*sys.path, str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        while not (place.exists() and place.read_text()):
            assert parent.poll() is None
            time.sleep(0.1)
        child = psutil.Process(int(place.read_text()))
        parent.send_signal(number)
        assert parent.wait(60) == 128 + number
        child.wait(60)
        assert not child.is_running()
    finally:
        parent.kill()
