"""Reports of runs, drawn from what lies in their directories: no model is loaded, nothing is computed anew."""
