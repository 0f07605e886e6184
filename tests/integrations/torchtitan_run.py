"""A configuration of torchtitan with the manager that saves in the background."""

from torchtitan.models.llama3 import config_registry
from torchtitan_manager import BackgroundManager


def llama3_8b():
    config = config_registry.llama3_8b()
    config.checkpoint = BackgroundManager.Config(enable=True, interval=500)
    return config
