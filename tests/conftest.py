"""What holds for every test."""

from hypothesis import settings

# How long an example takes says how busy the machine is, nothing of the code.
settings.register_profile("drumline", deadline=None)
settings.load_profile("drumline")
