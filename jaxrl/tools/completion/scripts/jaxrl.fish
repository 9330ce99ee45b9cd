# jaxrl completion fish | source
complete -c jaxrl -a '(jaxrl completion --line (commandline -cp) 2>/dev/null)'
