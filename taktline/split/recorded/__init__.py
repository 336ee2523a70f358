"""A model cut by its recorded forward: not in use yet, but meant to take the place of ``named``.

The forward of a model runs once, without the data of its layers, and is recorded as a list of
steps: calls of submodules, and functions of torch between them. The list is cut where stages begin,
and each stage runs its own steps in a loop, with nothing of torch replaced. The files, in reading
order:

- ``steps`` is the list of steps, ``nested`` finds tensors in nested values;
- ``empty_model`` is the model without data, ``hugging_face`` turns off its cache, ``without_data``
  runs it, and ``torch_functions`` has what functions of torch read;
- ``recorder`` notes each step, ``patches`` leads calls to it, ``user_code`` finds the user's line;
- ``record`` records one call, ``repeat`` does so twice and refuses what differs;
- ``cut`` decides which stage runs a step, and what crosses to the next one;
- ``program`` writes the steps of a stage as a function, ``run_steps`` is what that calls;
- ``kinds`` tells kinds of calls apart, ``recorded_stage`` is the module of a stage;
- ``by_names`` checks the cuts and makes the stages.

``taktline.split.by_names`` does not use it yet. Its tests are run by name,
``pytest tests/split/recorded_idioms.py``. What is missing before it can be used:

- an ``nn.Sequential`` is not sliced into ``nn.Sequential``, and ``auto`` does not ask for the costs
  of units, which ``repeat`` can count;
- types that change behind the stage: ``model.double()`` after the cut, not ``piece.double()``;
- units that fill a ``defaultdict`` among their arguments, which fail with an error of torch;
- the cache of keys and values with which ``Pipeline.generate`` runs, in several stages;
- re-entrant checkpoints: after other tests in one process, a weight before one got no gradient;
- a run of all architectures of the zoo over processes;
- size: it must take the place of ``named`` with fewer lines, not stand beside it, and ``recorder``
  is too long for one file.
"""
