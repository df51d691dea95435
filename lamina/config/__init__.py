"""The settings of a runtime, each defined once, and the environment variables."""
