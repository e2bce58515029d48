# Owner(s): ["module: inductor"]
"""The chunker takes the heads of ordinary language models."""

import unittest

import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config, metrics
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.auto_chunker import flat_rows
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.inductor_utils import HAS_CPU


aten = torch.ops.aten
invoke_subgraph = torch.ops.higher_order.invoke_subgraph

BATCH, TOKENS, WIDTH, WORDS = 4, 128, 64, 2048


def given(dtype=torch.float32, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, tokens, WIDTH, generator=generator)
    weight = torch.randn(WORDS, WIDTH, generator=generator) / WIDTH
    words = torch.randint(WORDS, (BATCH, tokens), generator=generator)
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight)]
    return [*leaves, words]


def in_float(hidden, weight, words):
    logits = F.linear(hidden.tanh(), weight).float()
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def next_words(hidden, weight, words):
    """Caps the logits, and leaves out those of the last token."""
    logits = 30 * torch.tanh(F.linear(hidden.tanh(), weight).float() / 30)
    logits = logits[..., :-1, :].contiguous().view(-1, WORDS)
    return F.cross_entropy(logits, words[..., 1:].contiguous().view(-1))


def masked(hidden, weight, words):
    logits = F.linear(hidden, weight)[:, :-1].flatten(0, 1)
    words = words[:, 1:]
    losses = F.cross_entropy(logits, words.flatten(), reduction="none").view_as(words)
    mask = (words % 3 > 0).float()
    return (losses * mask).sum() / mask.sum()


def by_class(hidden, weight, words):
    logits = F.linear(hidden, weight).flatten(0, 1)
    classes = torch.linspace(0, 1, WORDS)
    return F.cross_entropy(logits, words.flatten(), weight=classes)


LOSSES = [next_words, masked, by_class]
if torch.__version__ < (2, 12):
    # There, upstream's chunker has no rule for the views in the gradients of others.
    LOSSES = LOSSES[:1]


def in_double(hidden, weight, words):
    logits = F.linear(hidden, weight).flatten(0, 1).double()
    return F.cross_entropy(logits, words.flatten()) + 1e-4 * logits.square().sum()


def in_chunks(loss, compiler=nop):
    """A loss whose joint graph inductor rewrites, and eager mode runs."""

    def partition(module, inputs, **kwargs):
        module = joint_graph_passes(module)
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        # What overwrites a buffer is in the graph, as it is for inductor.
        keep_inference_input_mutations=True,
    )
    return torch.compile(loss, backend=backend)


def chunker(**options):
    options = {"enable": True, "num_chunk": 4, **options}
    return config.patch({f"auto_chunker.{name}": to for name, to in options.items()})


@instantiate_parametrized_tests
class AutoChunkerRowsTest(TestCase):
    def gradients(self, run, inputs):
        """The loss and its gradients, computed in chunks."""
        torch._dynamo.reset()
        metrics.reset()
        leaves = [each for each in inputs if each.requires_grad]
        with chunker(output_size_threshold=0):
            result = run(*inputs)
            found = [result, *torch.autograd.grad(result, leaves)]
        self.assertEqual(metrics.num_auto_chunking, 1)
        return found

    def check(self, loss, inputs, run):
        leaves = [each for each in inputs if each.requires_grad]
        result = loss(*inputs)
        wanted = [result, *torch.autograd.grad(result, leaves)]
        self.assertEqual(self.gradients(run, inputs), wanted)

    @unittest.skipUnless(HAS_CPU, "inductor cannot compile for the CPU here")
    # Plain loops compile fastest.
    @config.patch({"cpp.simdlen": 1, "force_disable_caches": True})
    def test_inductor(self):
        # Eager mode would add up chunks in double, whatever type the sum has.
        self.check(in_double, given(), torch.compile(in_double))

        inputs = given(torch.bfloat16)
        found = self.gradients(torch.compile(in_float), inputs)
        exact = [each.detach().float() for each in inputs[:2]]
        exact = [each.requires_grad_() for each in exact]
        gradients = torch.autograd.grad(in_float(*exact, inputs[-1]), exact)
        for each, other in zip(found[1:], gradients):
            self.assertLess((each.float() - other).norm() / other.norm(), 1e-2)

    @parametrize("loss", LOSSES, name_fn=lambda loss: loss.__name__)
    def test_losses_in_chunks(self, loss):
        self.check(loss, given(), in_chunks(loss))

    def test_no_rows_are_made_that_are_left_out(self):
        with chunker(output_size_threshold=0):
            graph = make_fx(next_words)(*given()).graph
            self.assertEqual(flat_rows.head_of(graph)[0], BATCH * (TOKENS - 1))

    def test_as_many_tokens_as_features(self):
        """What is as large as the logits is not part of the head for that."""
        inputs = given(tokens=WIDTH // BATCH)

        def loss(hidden, weight, words):
            return in_float(hidden, weight.exp(), words)

        self.check(loss, inputs, in_chunks(loss))

    def test_chunks_are_not_repeated(self):
        graphs = []

        def compiler(module, inputs):
            graphs.append(module.graph)
            return nop(module, inputs)

        # At 0, the partitioner saves the inputs alone, whatever has to be saved.
        with torch._functorch.config.patch(activation_memory_budget=0.5):
            self.check(in_float, given(), in_chunks(in_float, compiler))
        of = {"op": "call_function", "target": invoke_subgraph}
        self.assertEqual([len(graph.find_nodes(**of)) for graph in graphs], [4, 0])

    def test_a_low_rank_product_is_no_head(self):
        hidden, weight, words = given()
        down = torch.randn(2, WIDTH, requires_grad=True)
        up = torch.randn(8 * WIDTH, 2, requires_grad=True)
        back = torch.randn(WIDTH, 8 * WIDTH, requires_grad=True)

        def adapted(hidden, down, up, back):
            return F.linear(F.linear(F.linear(hidden, down), up), back)

        def with_head(hidden, down, up, back, weight, words):
            return in_float(adapted(hidden, down, up, back), weight, words)

        def without(hidden, down, up, back):
            return adapted(hidden, down, up, back).square().mean()

        with chunker(output_size_threshold=0):
            inputs = hidden, down, up, back
            graph = make_fx(with_head)(*inputs, weight, words).graph
            self.assertEqual(flat_rows.head_of(graph)[-1], WORDS)
            graph = make_fx(without)(*inputs).graph
            self.assertIsNone(flat_rows.head_of(graph))

    def test_a_head_with_few_words_is_left(self):
        hidden, weight, words = given()
        few = weight[: 4 * WIDTH].detach().clone().requires_grad_()
        inputs = hidden, few, words % len(few)
        graph = make_fx(in_float)(*inputs).graph
        self.assertIsNone(flat_rows.head_of(graph))


def logits_of(hidden, weight):
    return F.linear(hidden, weight).flatten(0, 1)


def weighted(hidden, weight, scale, words):
    """A term that reads the tangent, though it is no part of the head."""
    loss = F.cross_entropy(logits_of(hidden, weight), words.flatten())
    return loss * scale.exp() + scale


def over_tokens(hidden, weight, scale, words):
    chosen = F.log_softmax(logits_of(hidden, weight) * scale, -2)
    return -chosen.gather(1, words.view(-1, 1)).mean()


def of_mean_share(hidden, weight, scale, words):
    """What is computed of a sum over all tokens."""
    logits = logits_of(hidden, weight) * scale
    share = logits.softmax(-1).sum(0) / len(logits)
    return F.cross_entropy(logits, words.flatten()) + share.square().sum()


def picked(hidden, weight, scale, words):
    logits = logits_of(hidden, weight) * scale
    order = torch.arange(len(logits) - 1, -1, -1).view(-1, 1).expand_as(logits)
    return F.cross_entropy(logits.gather(0, order), words.flatten())


def numbered(hidden, weight, scale, words):
    """A tensor without arguments, of which each chunk has to see its own rows."""
    logits = logits_of(hidden, weight) * scale
    rows = torch.arange(len(logits), dtype=torch.float32).view(-1, 1)
    return F.cross_entropy(logits * (rows / len(logits)), words.flatten())


def of_all_and_some(hidden, weight, scale, words):
    """Reads the logits that another term leaves out."""
    logits = F.linear(hidden, weight) * scale
    loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), words[:, 1:].flatten())
    return loss + 1e-4 * logits.square().sum()


def of_two_parts(hidden, weight, scale, words):
    logits = F.linear(hidden, weight) * scale
    first = F.cross_entropy(logits[:, 1:].flatten(0, 1), words[:, 1:].flatten())
    last = F.cross_entropy(logits[:, :-2].flatten(0, 1), words[:, 2:].flatten())
    return first + last


class Adjusted(torch.nn.Module):
    """Reads a buffer in its head, and overwrites it afterwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prior", torch.zeros(WORDS))

    def forward(self, hidden, weight, scale, words):
        logits = logits_of(hidden, weight) * scale + self.prior
        loss = F.cross_entropy(logits, words.flatten())
        self.prior.add_(torch.linspace(-1, 1, WORDS))
        return loss


OTHERS = (
    weighted,
    over_tokens,
    of_mean_share,
    of_all_and_some,
    of_two_parts,
    picked,
    numbered,
    Adjusted,
)


@instantiate_parametrized_tests
class OtherLossesTest(TestCase):
    """Whether the chunker takes them or not, they are right."""

    @parametrize("loss", OTHERS, name_fn=lambda loss: loss.__name__)
    def test_gradients(self, loss):
        hidden, weight, words = given()
        scale = torch.tensor(0.3, requires_grad=True)
        leaves = hidden, weight, scale
        make = loss if loss is Adjusted else lambda: loss
        found = []
        for run in (make(), in_chunks(make())):
            torch._dynamo.reset()
            with chunker():
                for _ in range(2):
                    result = run(*leaves, words)
                    # Not the factor that chunks assume.
                    gradients = torch.autograd.grad(8 * result, leaves)
            found.append([result, *gradients])
        self.assertEqual(*found, rtol=1e-4, atol=1e-5)


class ComputeOnRowsTest(TestCase):
    def views(self, function, *inputs):
        """The views that are left in a graph, which computes the same as before."""
        module = make_fx(function, tracing_mode="fake")(*inputs)
        for node in module.graph.nodes:
            if node.target is aten.reshape.default:
                node.target = aten.view.default
        flat_rows.compute_on_rows(module.graph, 6)
        module.graph.lint()
        module.recompile()
        self.assertEqual(module(*inputs), function(*inputs))
        return len(
            module.graph.find_nodes(op="call_function", target=aten.view.default)
        )

    def test_views_that_meet_go_away(self):
        rows = torch.randn(6, 4)

        def there_and_back(x, y):
            x, y = x.view(2, 3, 4), y.view(2, 3, 4)
            return (x.sin() * y + 1).view(6, 4)

        self.assertEqual(self.views(there_and_back, rows, rows), 0)

    def test_one_element_for_each_row(self):
        def weighed(x, y):
            return (x.view(2, 3).exp() * y).view(6)

        y = torch.randn(3, 2).t()
        self.assertEqual(self.views(weighed, torch.randn(6), y), 1)

    def test_what_reads_batches_gets_a_view(self):
        def summed(x):
            x = x.view(2, 3, 4).exp()
            return x.sum(1), x.view(6, 4)

        self.assertEqual(self.views(summed, torch.randn(6, 4)), 1)

    def test_other_views_stay(self):
        def regrouped(x, y):
            return x.view(3, 2, 4).exp(), x.view(2, 3, 4) + y

        inputs = torch.randn(6, 4), torch.randn(2, 3, 4)
        self.assertEqual(self.views(regrouped, *inputs), 2)


if __name__ == "__main__":
    run_tests()
