"""`tierpick demo --chaos`: the demo's fleet while its engines, event connections and picker fail and come back."""
