"""What a user of verl brings along: plug-ins, configs, rewards and dumps made ours, and our episodes inside verl."""
