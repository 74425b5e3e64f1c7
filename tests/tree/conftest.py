"""Hypothesis without its deadline: machines that run tests are busy, and a slow example is no fault of ours."""

from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
