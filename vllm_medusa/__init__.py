"""Medusa speculative decoding for vLLM: trees of guesses, checked in one pass, the same tokens sooner.

vLLM loads the plugin by itself (`plugin.py`). Its parts can be used alone too; importing this package imports none of
them. A tree by hand, and the settings that would serve it:

>>> from vllm_medusa.tree.choices import parse_choices
>>> tree = parse_choices([[0], [1], [0, 0]], num_heads=4, top_k=10)
>>> tree.depths, tree.path(3), tree.ancestor_masks()[:, 0].tolist()
((0, 1, 1, 2), (1, 3), [0, 1, 2, 5])
>>> from vllm_medusa.config import MedusaConfig
>>> MedusaConfig.parse({"method": "medusa", "model": "heads/", "tree": [[0], [1], [0, 0]]})[0].tree
[[0], [1], [0, 0]]
"""

__version__ = "0.1.0"
