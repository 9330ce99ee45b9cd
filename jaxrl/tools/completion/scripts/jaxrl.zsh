# source <(jaxrl completion zsh)
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_jaxrl() {
    local -a found
    found=("${(@f)$(jaxrl completion --line "$LBUFFER" 2>/dev/null)}")
    [[ -n $found[1] ]] && compadd -Q -S '' -- $found || _files
}
compdef _jaxrl jaxrl
