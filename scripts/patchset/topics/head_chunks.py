from ..patch import Patch, planner_path


PATCH = Patch(
    name="head-chunks",
    subject="Run a large head in as many chunks as a bound on the peak needs",
    why="""\
With a large vocabulary the logits, their softmax and their gradient are the peak of a
step, whatever is saved: a language model with 152,000 words and 4,096 tokens peaks at
2 GB at every budget. config.auto_chunker runs the head in chunks, but somebody has to
choose how many: few do not fit, many read the weights of the head over and over.

Where a peak is asked for, or a StepBudget, a joint graph with such a head is prepared
once for each number of chunks. The plans of all of these are compared by what they hold
and by what they cost, like plans that save other values, so there are as many chunks as
the bound needs. The report says how many, and if none, why.
""",
    test="test/functorch/test_ac_head_chunks.py",
    sources=(planner_path("compile/head_chunks"),),
    needs=("step-budget", "auto-chunker"),
    since=(2, 13),
    risks="""\
Only where a peak or a StepBudget is asked for, and a graph has a large head: preparing
it takes about half a second more for each number of chunks. Sums over the batch are
added up chunk by chunk, in the type of the weights.
""",
)
