"""The entry point that vLLM calls in each of its processes."""

from vllm_medusa.errors import MedusaError


def register() -> None:
    """Teach this process's vLLM `method: "medusa"`. Safe to call twice; silent for runs that do not ask for it.

    A host that we do not know is left as it is, apart from one readable error when Medusa is asked for.
    """
    from vllm_medusa.host.compat import find_problems
    from vllm_medusa.host.patches import install, install_refusal

    problems = find_problems()
    if problems:
        install_refusal(MedusaError("medusa: this vLLM cannot run Medusa trees: " + "; ".join(problems)))
    else:
        install()
