"""Everything that takes a number off a machine."""
