"""How tools are found, checked, run and answered: loading, options, schemas, replies, and the episode's toolbox."""
