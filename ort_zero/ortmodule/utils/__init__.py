"""Help with Python objects, frames and containers in a trace."""
