"""Computes the steps that the engine plans: `runner.py` returns a StepResult for each plan.

There are four ways forward. The first one in this table that can compute a plan does, because each
one is faster than those below it:

| way                                | computes                                                    |
|------------------------------------|-------------------------------------------------------------|
| compiled call, decode_fast_path.py | on a CPU with compiled kernels: plain decode steps, from    |
|                                    | the slots to the logits and the most likely tokens          |
| captured graphs, decode_graph.py   | on a GPU: plain decode steps without adapters, of at most   |
|                                    | as many rows as graphs were captured for                    |
| whole pass, models/whole_step.py   | on a CPU with compiled kernels: the hidden states of a      |
|                                    | step, if all linears are packed and the step is not so long |
|                                    | that dense weights are faster                               |
| decoder, models/decoder.py         | any step of any family, one operation at a time             |

In a plain decode step, every row computes one position and samples after it. Most steps are plain,
and Python would take much of their time, so they have ways of their own. A worker has at most one
of these two, and the runner asks it first (`PlainDecode.is_for`). For any other step the runner
calls the model, and `DecoderModel` chooses between its whole pass and its layers. Models that
transformers computes (models/hf.py) have none of the first three ways.

The decoder is the reference, and tests compare the others with it.
"""
