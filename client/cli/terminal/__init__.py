"""What every command shares: options, output, errors, hints."""
