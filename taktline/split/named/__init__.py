"""A model cut at its submodules, whose own forward runs in every stage.

To cut a model:

- ``by_names`` checks the cuts, and puts the submodules into stages;
- ``sequential`` slices an ``nn.Sequential``, ``recurrent`` opens an LSTM between its layers;
- ``containers``, ``units`` and ``layout`` build the modules of a stage: own submodules, and
  replacements of foreign ones;
- ``dry_run`` runs the forward without data, ``dry_run_context`` follows where its values come from,
  and ``forward_summary`` says what crosses each cut.

To run without data, there and in each stage:

- ``placeholder`` is a tensor without data, and finds the shapes of results of operations;
- ``shape_probe`` finds what a submodule returns, ``side_effects`` what it leaves behind besides;
- ``data_dependent`` has the numbers that a forward reads from tensors, ``checkpoints`` what is
  special about gradient checkpoints, and ``hugging_face`` about models of transformers;
- ``changes`` finds and undoes what the forward changes, ``mutable`` does so for single values.

To run a stage:

- ``stage_forward`` chooses how to run a micro-batch, ``known_calls`` has what earlier ones showed;
- ``stage_run`` is such a run: ``first_run`` with new shapes, ``repeated_run`` with known ones;
- ``direct_calls`` calls the submodules without the forward, if ``guards`` finds that it is plain.
"""
