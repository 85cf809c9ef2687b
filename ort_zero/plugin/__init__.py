"""The plugin: switched on by an entry point or by hand, it connects DeepSpeed's engine to the rest of the package."""

from ort_zero.plugin.lifecycle import autoload, disable, enable, is_enabled, status

__all__ = ["autoload", "disable", "enable", "is_enabled", "status"]
