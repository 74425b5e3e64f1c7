"""Products of few rows with the matrices of a model, on a CPU.

`operator` is the product itself, `measure` finds out for which numbers of rows it is quicker than another one. Neither
knows vLLM; the side that does puts the product where vLLM has its own.
"""
