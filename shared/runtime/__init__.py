"""What every process does alike: settings, logs, the HTTP shell, owned background loops."""
