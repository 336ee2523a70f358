"""A model cut at its submodules, whose own forward runs in every stage."""
