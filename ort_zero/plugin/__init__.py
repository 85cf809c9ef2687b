"""Connect DeepSpeed's engine to the rest of the package, once an entry point or the user enables the plugin."""

from ort_zero.plugin.lifecycle import autoload, disable, enable, is_enabled, status

__all__ = ["autoload", "disable", "enable", "is_enabled", "status"]
