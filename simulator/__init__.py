"""Predicts how a cluster serves a workload: simulated time, the real engine and the real router.

`python -m simulator --config JSON` is the entrance, and `tidegate simulate` is its front
(protocol/tools/simulation.py). The room imports `engine_core` and the pure modules of
`gateway/engine`, because it runs them. No other room imports it.
"""
