"""RL on trees of rollouts: shared prefixes are computed once, as a Megatron pipeline schedule under DeepSpeed."""
