"""What keeping bits and looking at them costs, one section a claim.

exact_step   a training step in exact mode, dp and fsdp on two ranks, of the shapes of a Llama of 125 million
             parameters: at most 1.15 times the default step. `--quick` takes one of its twelve layers and a twelfth
             of its vocabulary.
exact_tp     a step of exact mode in fixed pieces on two tensor-parallel ranks, at the same shapes: at most 1.3 times
             the default's.
tree_reduce  an all-reduce in the order of the tree on four ranks, from 32 MiB on: at most 1.25 times gloo's, whose
             order is the ranks', and no byte more than a ring sends.
invariance   batch-invariant operators: at most 1.1 times torch's, forward and backward, from 64 tokens on.
capture      a step that is recorded: at most 1.10 times a step where hashes are kept, 2 times where tensors are;
             nothing at all where nothing is recorded.
diff         two captures of 1 GiB each, of which every element differs, compared by every measure in less than 10 s
             and 1 GiB of memory; `--quick` takes a quarter of each.

    python benchmarks/numerics.py [--quick] [--json] [--only exact_step,...]
"""

from sections import exact_step, exact_tp, invariance, numerics_capture, numerics_diff, tree_reduce
from sections.section import run_sections

SECTIONS = {
    "exact_step": exact_step.measure,
    "exact_tp": exact_tp.measure,
    "tree_reduce": tree_reduce.measure,
    "invariance": invariance.measure,
    "capture": numerics_capture.measure,
    "diff": numerics_diff.measure,
}


if __name__ == "__main__":
    raise SystemExit(run_sections(__doc__, SECTIONS))
