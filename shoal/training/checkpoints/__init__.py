"""Checkpoints: all that a run needs to go on, as safetensors and JSON; nothing in them is ever unpickled.

`tensor_files.py` is the files of tensors, `folder.py` the folders and their manifests, `progress.py` how far a run is,
`job_state.py` what a job has to save, `carry_over.py` what fits other settings, `saving.py` writes beside training.
"""
